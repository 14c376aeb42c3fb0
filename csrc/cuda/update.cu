/* One optimizer step over a segment: load, rule, store. Rules are in device/rules.h. */
#include "elements.cuh"

#define UPDATE_THREADS 256u
#define UPDATE_EACH ((size_t)UPDATE_THREADS * FS_FOUR)

/* Rules with the variants that have arrays of their own. */
enum { RULE_SGD, RULE_MOMENTUM, RULE_ADAM, RULE_ADAMW, RULE_AMSGRAD, RULE_AMSGRADW, RULE_LION,
       RULE_ADAGRAD };

template <int rule>
FS_DEVICE_FN void
apply_rule(const fs_hyper *h, float scale, float g, float *w, float *m, float *v, float *x)
{
    if (rule == RULE_SGD) {
        fs_rule_sgd(h, scale, g, w);
    } else if (rule == RULE_MOMENTUM) {
        fs_rule_momentum(h, scale, g, w, m);
    } else if (rule == RULE_ADAM) {
        fs_rule_adam(h, scale, g, w, m, v);
    } else if (rule == RULE_ADAMW) {
        fs_rule_adamw(h, scale, g, w, m, v);
    } else if (rule == RULE_AMSGRAD) {
        fs_rule_amsgrad(h, scale, g, w, m, v, x);
    } else if (rule == RULE_AMSGRADW) {
        fs_rule_amsgradw(h, scale, g, w, m, v, x);
    } else if (rule == RULE_LION) {
        fs_rule_lion(h, scale, g, w, m);
    } else {
        fs_rule_adagrad(h, scale, g, w, m);
    }
}

/* Stores as the update says: see fs_update.stochastic. */
FS_DEVICE_FN void
store_rounded(const fs_update *u, void *array, fs_dtype dtype, uint64_t stream, size_t at,
              const float x[FS_FOUR], unsigned n)
{
    if (!u->stochastic || dtype != FS_BF16) {
        fs_store_four(array, dtype, at, x, n);
        return;
    }
    uint64_t key = fs_mix_u64(u->hyper.random_key + stream);
    uint16_t halves[FS_FOUR];
    for (unsigned i = 0; i < n; i++) {
        uint64_t element = u->first + at + i;
        uint32_t random = fs_random_u32(fs_mix_u64(key + (element >> 32)), (uint32_t)element);
        halves[i] = fs_bf16_of_f32_random(x[i], random >> 16);
    }
    fs_store_halves((uint16_t *)array, at, halves, n);
}

/* The logical fp32 weight, wherever it lies. */
FS_DEVICE_FN void
load_weight(const fs_update *u, float w[FS_FOUR], size_t at, unsigned n)
{
    const void *weight = u->weight != NULL ? u->weight : u->weight_read;
    if (u->master != NULL) {
        fs_load_four(w, u->master, FS_F32, at, n);
    } else if (u->remainder != NULL) {
        uint16_t upper[FS_FOUR], lower[FS_FOUR];
        fs_load_halves(upper, (const uint16_t *)weight, at, n);
        fs_load_halves(lower, u->remainder, at, n);
        for (unsigned i = 0; i < n; i++) {
            w[i] = fs_join_f32(upper[i], lower[i]);
        }
    } else {
        fs_load_four(w, weight, u->weight_dtype, at, n);
    }
}

FS_DEVICE_FN void
store_weight(const fs_update *u, const float w[FS_FOUR], size_t at, unsigned n)
{
    if (u->master != NULL) {
        fs_store_four(u->master, FS_F32, at, w, n);
    }
    if (u->remainder != NULL) {
        uint16_t upper[FS_FOUR], lower[FS_FOUR];
        for (unsigned i = 0; i < n; i++) {
            upper[i] = fs_split_f32(w[i], &lower[i]);
        }
        fs_store_halves(u->remainder, at, lower, n);
        if (u->weight != NULL) {
            fs_store_halves((uint16_t *)u->weight, at, upper, n);
        }
    } else if (u->weight != NULL) {
        store_rounded(u, u->weight, u->weight_dtype, FS_STREAM_WEIGHT, at, w, n);
    }
}

template <int rule>
static __global__ void
update_kernel(fs_update update)
{
    const fs_update *u = &update;
    for (size_t at = fs_first_four(); at < u->n; at += fs_stride_fours()) {
        unsigned here = fs_four_of(u->n, at);
        float g[FS_FOUR], w[FS_FOUR], m[FS_FOUR] = {0}, v[FS_FOUR] = {0}, x[FS_FOUR] = {0};
        fs_load_four(g, u->grad, u->grad_dtype, at, here);
        load_weight(u, w, at, here);
        if (u->moment1 != NULL) {
            fs_load_four(m, u->moment1, u->moment_dtype, at, here);
        }
        if (u->moment2 != NULL) {
            fs_load_four(v, u->moment2, u->moment_dtype, at, here);
        }
        if (u->moment3 != NULL) {
            fs_load_four(x, u->moment3, u->moment_dtype, at, here);
        }
        for (unsigned i = 0; i < here; i++) {
            apply_rule<rule>(&u->hyper, u->grad_scale, g[i], &w[i], &m[i], &v[i], &x[i]);
        }
        if (u->moment1 != NULL) {
            store_rounded(u, u->moment1, u->moment_dtype, FS_STREAM_MOMENT1, at, m, here);
        }
        if (u->moment2 != NULL) {
            store_rounded(u, u->moment2, u->moment_dtype, FS_STREAM_MOMENT2, at, v, here);
        }
        if (u->moment3 != NULL) {
            store_rounded(u, u->moment3, u->moment_dtype, FS_STREAM_MOMENT3, at, x, here);
        }
        store_weight(u, w, at, here);
    }
}

// ---- checks -------------------------------------------------------------------------------------

/* Which rule with which arrays; an update without an array that its rule needs is refused. */
static fs_status
choose_rule(const fs_update *u, int *out)
{
    bool first = u->moment1 != NULL, second = u->moment2 != NULL, third = u->moment3 != NULL;
    bool right = false;
    switch (u->hyper.rule) {
    case FS_RULE_SGD:
        *out = first ? RULE_MOMENTUM : RULE_SGD;
        right = !second && !third;
        break;
    case FS_RULE_ADAM:
        *out = third ? RULE_AMSGRAD : RULE_ADAM;
        right = first && second;
        break;
    case FS_RULE_ADAMW:
        *out = third ? RULE_AMSGRADW : RULE_ADAMW;
        right = first && second;
        break;
    case FS_RULE_LION:
        *out = RULE_LION;
        right = first && !second && !third;
        break;
    case FS_RULE_ADAGRAD:
        *out = RULE_ADAGRAD;
        right = first && !second && !third;
        break;
    default:
        return FS_FAIL(FS_EINVAL, "update: no rule has number %d", (int)u->hyper.rule);
    }
    if (!right) {
        return FS_FAIL(FS_EINVAL,
                       "update: rule %d does not go with these moments: first %s, second %s, "
                       "third %s",
                       (int)u->hyper.rule, first ? "given" : "missing",
                       second ? "given" : "missing", third ? "given" : "missing");
    }
    return FS_OK;
}

static fs_status
check_update(const fs_update *u)
{
    size_t nbytes;
    FS_TRY(fs_cuda_check_float(u->grad_dtype, "update", "of gradients"));
    FS_TRY(fs_cuda_check_float(u->weight_dtype, "update", "of weights"));
    FS_TRY(fs_cuda_check_float(u->moment_dtype, "update", "of moments"));
    FS_TRY(fs_mul_size(u->n, sizeof(double), &nbytes));
    if (u->grad == NULL) {
        return FS_FAIL(FS_EINVAL, "update: no gradient");
    }
    if (u->master == NULL && u->weight == NULL && u->weight_read == NULL) {
        return FS_FAIL(FS_EINVAL, "update: neither a master nor a weight");
    }
    if (u->remainder != NULL && (u->master != NULL || u->weight_dtype != FS_BF16)) {
        return FS_FAIL(FS_EINVAL, "update: a remainder goes with bfloat16 weights and no master, "
                                  "not with %s and %s",
                       fs_dtype_name(u->weight_dtype), u->master == NULL ? "none" : "one");
    }
    return FS_OK;
}

static fs_touched
update_touches(const fs_update *u)
{
    fs_touched touched;
    size_t weights = u->n * fs_dtype_nbytes(u->weight_dtype);
    size_t moments = u->n * fs_dtype_nbytes(u->moment_dtype);
    touched.reads(u->grad, u->n * fs_dtype_nbytes(u->grad_dtype));
    touched.writes(u->master, u->master == NULL ? 0 : u->n * sizeof(float));
    touched.writes(u->remainder, u->remainder == NULL ? 0 : u->n * sizeof(uint16_t));
    touched.writes(u->weight, u->weight == NULL ? 0 : weights);
    touched.reads(u->weight_read, u->weight_read == NULL ? 0 : weights);
    touched.writes(u->moment1, u->moment1 == NULL ? 0 : moments);
    touched.writes(u->moment2, u->moment2 == NULL ? 0 : moments);
    touched.writes(u->moment3, u->moment3 == NULL ? 0 : moments);
    return touched;
}

extern "C" fs_status
fs_cuda_update(fs_cuda_stream stream, const fs_update *update)
{
    typedef void (*kernel_fn)(fs_update);
    static const kernel_fn kernels[] = {
        update_kernel<RULE_SGD>,      update_kernel<RULE_MOMENTUM>, update_kernel<RULE_ADAM>,
        update_kernel<RULE_ADAMW>,    update_kernel<RULE_AMSGRAD>,  update_kernel<RULE_AMSGRADW>,
        update_kernel<RULE_LION>,     update_kernel<RULE_ADAGRAD>,
    };
    int rule = RULE_SGD;
    FS_TRY(fs_cuda_check_stream(stream, "update"));
    if (update->n == 0) {
        return FS_OK; /* no array needs to be there */
    }
    FS_TRY(choose_rule(update, &rule));
    FS_TRY(check_update(update));
    FS_LAUNCH(kernels[rule], fs_cuda_blocks(update->n, UPDATE_EACH), UPDATE_THREADS, 0, stream,
              update_touches(update), *update);
    return fs_cuda_launched("update");
}
