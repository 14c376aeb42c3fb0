/* Update rules: what one step does to one element, each in one function, in the form of
 * torch.optim.
 *
 * g is the gradient as summed, scale what it is multiplied by on load (clipping, mean and loss
 * scale in one number). Scalars come from fs_hyper, computed in fp64 and rounded once. A new rule
 * is one function here and one row in update.inc. */
#ifndef FS_DEVICE_RULES_H
#define FS_DEVICE_RULES_H

#include "../base/math.h"
#include "device.h"

/* Arrays that are rounded at random, each by numbers of its own: see fs_update.stochastic. */
enum { FS_STREAM_WEIGHT, FS_STREAM_MOMENT1, FS_STREAM_MOMENT2, FS_STREAM_MOMENT3 };

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

/* The moments that Adam and AdamW share. Kingma and Ba 2015, algorithm 1. */
FS_HD void
fs_rule_adam_moments(const fs_hyper *h, float g, float *m, float *v)
{
    float m_new = *m + h->one_minus_beta1 * (g - *m);
    float v_new = h->beta2 * *v + h->one_minus_beta2 * g * g;
    *m = fs_flush_tiny(m_new);
    *v = fs_flush_tiny(v_new);
}

/* The step to subtract; epsilon is added after the bias correction. */
FS_HD float
fs_rule_adam_step(const fs_hyper *h, float m, float v)
{
    float denom = fs_sqrt_f32(v) * h->inv_sqrt_bc2 + h->eps;
    return h->step_size * m / denom;
}

/* Keeps the largest second moment so far in *x.
 * Reddi, Kale and Kumar 2018, algorithm 2; bias corrected after, as torch.optim does. */
FS_HD float
fs_rule_amsgrad_largest(float v, float *x)
{
    *x = v > *x ? v : *x;
    return *x;
}

/* Decay is added to the gradient. */
FS_HD void
fs_rule_adam(const fs_hyper *h, float scale, float g, float *w, float *m, float *v)
{
    g = g * scale;
    g = h->decay != 0.0f ? g + h->decay * *w : g;
    fs_rule_adam_moments(h, g, m, v);
    *w = *w - fs_rule_adam_step(h, *m, *v);
}

/* Decay shrinks the old weight (h->decay is 1 - lr * weight_decay), apart from the moments.
 * Loshchilov and Hutter 2019, algorithm 2. */
FS_HD void
fs_rule_adamw(const fs_hyper *h, float scale, float g, float *w, float *m, float *v)
{
    fs_rule_adam_moments(h, g * scale, m, v);
    *w = *w * h->decay - fs_rule_adam_step(h, *m, *v);
}

FS_HD void
fs_rule_amsgrad(const fs_hyper *h, float scale, float g, float *w, float *m, float *v, float *x)
{
    g = g * scale;
    g = h->decay != 0.0f ? g + h->decay * *w : g;
    fs_rule_adam_moments(h, g, m, v);
    *w = *w - fs_rule_adam_step(h, *m, fs_rule_amsgrad_largest(*v, x));
}

FS_HD void
fs_rule_amsgradw(const fs_hyper *h, float scale, float g, float *w, float *m, float *v, float *x)
{
    fs_rule_adam_moments(h, g * scale, m, v);
    *w = *w * h->decay - fs_rule_adam_step(h, *m, fs_rule_amsgrad_largest(*v, x));
}

/* The sign of the gradient blended with the momentum, whose own blend comes after; decay as
 * AdamW's. A blend of zero moves nothing. Chen et al. 2023, program 1. */
FS_HD void
fs_rule_lion(const fs_hyper *h, float scale, float g, float *w, float *m)
{
    g = g * scale;
    float blend = h->beta1 * *m + h->one_minus_beta1 * g;
    *m = fs_flush_tiny(h->beta2 * *m + h->one_minus_beta2 * g);
    float down = blend > 0.0f ? h->lr : 0.0f;
    float up = blend < 0.0f ? h->lr : 0.0f;
    *w = *w * h->decay - (down - up);
}

/* Decay is added to the gradient; s is the sum of squares.
 * Duchi, Hazan and Singer 2011, diagonal form, in that of torch.optim. */
FS_HD void
fs_rule_adagrad(const fs_hyper *h, float scale, float g, float *w, float *s)
{
    g = g * scale;
    g = h->decay != 0.0f ? g + h->decay * *w : g;
    float sum = fs_flush_tiny(*s + g * g);
    *s = sum;
    *w = *w - h->step_size * g / (fs_sqrt_f32(sum) + h->eps);
}

#endif
