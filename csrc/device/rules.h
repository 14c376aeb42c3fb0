/* Update rules: what one step does to one element, each in one function, in the form of torch.optim.
 *
 * g is the gradient as summed, scale what it is multiplied by on load (clipping, mean and loss scale
 * in one number). Scalars come from fs_hyper, computed in fp64 and rounded once. A new rule is one
 * function here and one row in update.inc. */
#ifndef FS_DEVICE_RULES_H
#define FS_DEVICE_RULES_H

#include "../base/math.h"
#include "device.h"

/* Stochastic gradient descent without momentum, decay added to the gradient. */
FS_HD void
fs_rule_sgd(const fs_hyper *h, float scale, float g, float *w)
{
    g = g * scale;
    g = h->decay != 0.0f ? g + h->decay * *w : g;
    *w = *w - h->lr * g;
}

/* With momentum: b = beta1 b + g, without dampening; the first step sets b = g. */
FS_HD void
fs_rule_momentum(const fs_hyper *h, float scale, float g, float *w, float *b)
{
    g = g * scale;
    g = h->decay != 0.0f ? g + h->decay * *w : g;
    float moved = h->first ? g : h->beta1 * *b + g;
    moved = fs_flush_tiny(moved);
    *b = moved;
    float direction = h->nesterov ? g + h->beta1 * moved : moved;
    *w = *w - h->lr * direction;
}

/* The moments that Adam and AdamW share; returns the step to subtract.
 * Kingma and Ba 2015, algorithm 1; epsilon is added after the bias correction. */
FS_HD float
fs_rule_adam_step(const fs_hyper *h, float g, float *m, float *v)
{
    float m_new = *m + h->one_minus_beta1 * (g - *m);
    float v_new = h->beta2 * *v + h->one_minus_beta2 * g * g;
    m_new = fs_flush_tiny(m_new);
    v_new = fs_flush_tiny(v_new);
    *m = m_new;
    *v = v_new;
    float denom = fs_sqrt_f32(v_new) * h->inv_sqrt_bc2 + h->eps;
    return h->step_size * m_new / denom;
}

/* Decay is added to the gradient. */
FS_HD void
fs_rule_adam(const fs_hyper *h, float scale, float g, float *w, float *m, float *v)
{
    g = g * scale;
    g = h->decay != 0.0f ? g + h->decay * *w : g;
    *w = *w - fs_rule_adam_step(h, g, m, v);
}

/* Decay shrinks the old weight (h->decay is 1 - lr * weight_decay), apart from the moments.
 * Loshchilov and Hutter 2019, algorithm 2. */
FS_HD void
fs_rule_adamw(const fs_hyper *h, float scale, float g, float *w, float *m, float *v)
{
    float step = fs_rule_adam_step(h, g * scale, m, v);
    *w = *w * h->decay - step;
}

#endif
