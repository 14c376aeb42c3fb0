"""Plain float64 optimizers over dictionaries of arrays, to compare sharded ones with."""

import numpy as np


def clip(grads, max_norm):
    """(norm, gradients scaled as torch.nn.utils.clip_grad_norm_ does)."""
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads.values()))
    scale = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    return norm, {name: g * scale for name, g in grads.items()}


class Reference:
    """SGD, Adam or AdamW in float64, one step count per parameter."""

    def __init__(self, rule, params, **options):
        self.rule, self.options = rule, options
        self.params = {name: np.asarray(p, np.float64).copy() for name, p in params.items()}
        self.steps = dict.fromkeys(params, 0)
        self.m = {name: np.zeros(np.shape(p)) for name, p in params.items()}
        self.v = {name: np.zeros(np.shape(p)) for name, p in params.items()}

    def step(self, grads):
        o = self.options
        lr, decay = o["lr"], o.get("weight_decay", 0.0)
        for name, g in grads.items():
            g = np.asarray(g, np.float64)
            w = self.params[name]
            self.steps[name] += 1
            t = self.steps[name]
            if self.rule == "SGD":
                g = g + decay * w
                momentum = o.get("momentum", 0.0)
                if momentum:
                    self.m[name] = g if t == 1 else momentum * self.m[name] + g
                    g = g + momentum * self.m[name] if o.get("nesterov") else self.m[name]
                self.params[name] = w - lr * g
                continue
            beta1, beta2 = o.get("betas", (0.9, 0.999))
            if self.rule == "Adam":
                g = g + decay * w
            else:
                w = w * (1 - lr * decay)
            self.m[name] = beta1 * self.m[name] + (1 - beta1) * g
            self.v[name] = beta2 * self.v[name] + (1 - beta2) * g * g
            m = self.m[name] / (1 - beta1**t)
            v = self.v[name] / (1 - beta2**t)
            self.params[name] = w - lr * m / (np.sqrt(v) + o.get("eps", 1e-8))
