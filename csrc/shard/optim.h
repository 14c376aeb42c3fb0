/* An optimizer over shards: hyperparameters per group, a step count per parameter, one call a
 * step. */
#ifndef FS_SHARD_OPTIM_H
#define FS_SHARD_OPTIM_H

#include "shard.h"

/* Hyperparameters of a group, as the user gave them, in fp64. Unused ones are ignored. */
typedef struct fs_group {
    double lr, beta1, beta2, eps, weight_decay, momentum, lr_decay;
    bool nesterov;
} fs_group;

/* May shards with moments_n moment arrays be moved by the rule? SGD keeps none, or one with
 * momentum; Adam and AdamW 2, or 3 with AMSGrad; Lion and Adagrad 1. */
bool fs_rule_takes_moments(fs_rule rule, int moments_n);

/* The scalars of step number step (1 = first) of a parameter: fp64, each rounded once.
 * Source: Kingma & Ba 2015, Loshchilov & Hutter 2019, Chen et al. 2023, Duchi et al. 2011, in the
 * form of torch.optim. */
fs_hyper fs_hyper_make(fs_rule rule, const fs_group *group, int64_t step);

/* Finishes the step agreed on (fs_step_agree): steps[p] of each parameter that had a gradient moves
 * if the verdict applied. group_of and steps have params_n entries. */
FS_NODISCARD fs_status
fs_optimizer_finish(fs_shards *shards, fs_rule rule, const fs_group *groups, const int *group_of,
                    int64_t *steps);

#endif
