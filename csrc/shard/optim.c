/* Scalars of an update, from groups and step counts. */
#include "optim.h"

#include <math.h>

#include "../base/math.h"
#include "shards_internal.h"

bool
fs_rule_takes_moments(fs_rule rule, int moments_n)
{
    switch (rule) {
    case FS_RULE_SGD:
        return moments_n == 0 || moments_n == 1;
    case FS_RULE_LION:
    case FS_RULE_ADAGRAD:
        return moments_n == 1;
    case FS_RULE_ADAM:
    case FS_RULE_ADAMW:
        return moments_n == 2 || moments_n == 3;
    case FS_RULE_COUNT:
        break;
    }
    return false;
}

/* base^exponent by repeated squaring: the same bits on every machine, which pow does not
 * promise. */
static double
power(double base, int64_t exponent)
{
    double result = 1.0;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) {
            result *= base;
        }
        base *= base;
    }
    return result;
}

fs_hyper
fs_hyper_make(fs_rule rule, const fs_group *group, int64_t step)
{
    fs_hyper hyper = {.rule = rule, .lr = (float)group->lr};
    if (rule == FS_RULE_SGD) {
        hyper.decay = (float)group->weight_decay;
        hyper.beta1 = (float)group->momentum;
        hyper.nesterov = group->nesterov;
        hyper.first = step <= 1;
        return hyper;
    }
    hyper.eps = (float)group->eps;
    if (rule == FS_RULE_ADAGRAD) {
        hyper.decay = (float)group->weight_decay;
        hyper.step_size = (float)(group->lr / (1.0 + (double)(step - 1) * group->lr_decay));
        return hyper;
    }
    double bias1 = 1.0 - power(group->beta1, step);
    double bias2 = 1.0 - power(group->beta2, step);
    hyper.decay = (float)(rule == FS_RULE_ADAM ? group->weight_decay
                                               : 1.0 - group->lr * group->weight_decay);
    hyper.beta1 = (float)group->beta1;
    hyper.beta2 = (float)group->beta2;
    hyper.one_minus_beta1 = (float)(1.0 - group->beta1);
    hyper.one_minus_beta2 = (float)(1.0 - group->beta2);
    hyper.step_size = (float)(group->lr / bias1);
    hyper.inv_sqrt_bc2 = (float)(1.0 / sqrt(bias2));
    return hyper;
}

/* Of a parameter in a step: the same for any world, stage, partition and instruction set, and after
 * a restart, since steps are counted per parameter and parameters in the order of the model. */
static uint64_t
random_key(uint64_t seed, int64_t step, int param)
{
    uint64_t key = fs_mix_u64(seed + UINT64_C(0x9e3779b97f4a7c15));
    key = fs_mix_u64(key + (uint64_t)step);
    return fs_mix_u64(key + (uint64_t)param);
}

fs_status
fs_optimizer_finish(fs_shards *shards, fs_rule rule, const fs_group *groups, const int *group_of,
                    int64_t *steps)
{
    const fs_layout *layout = shards->layout;
    FS_TRY(fs_shards_ready(shards));
    if (!shards->agreed) {
        return FS_FAIL(FS_ESTATE, "rank %d: no step was agreed on", shards->rank);
    }
    if (!fs_rule_takes_moments(rule, shards->moments_n)) {
        return FS_FAIL(FS_EINVAL, "rank %d: rule %d does not go with %d moments", shards->rank,
                       (int)rule, shards->moments_n);
    }
    bool applied = shards->verdict.applied;
    for (int p = 0; applied && p < layout->params_n; p++) {
        if (shards->had[p]) {
            steps[p]++;
            shards->hyper[p] = fs_hyper_make(rule, &groups[group_of[p]], steps[p]);
            shards->hyper[p].random_key = random_key(shards->policy.precision.seed, steps[p], p);
        }
    }
    return fs_step_finish(shards, shards->hyper);
}
