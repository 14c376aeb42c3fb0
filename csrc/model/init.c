/* Initial weights: a pure function of (seed, parameter, element), so that every rank makes only the
 * segments it keeps, and the model is the same at every world size, stage and partition. */
#include <math.h>

#include "../base/checked.h"
#include "parts.h"

/* Elements made at a time. */
#define CHUNK_N ((size_t)1 << 18)

/* Standard deviation of each parameter's normal numbers; 0: a constant. */
typedef struct initial {
    double std;
    float constant;
} initial;

static initial
initial_of(const fs_llama *llama, int param, double std)
{
    const fs_llama_config *config = &llama->config;
    if (llama->layout->params[param].dims_n == 1) {
        /* Vectors are norms (1) and biases (0). */
        bool norm = param == fs_llama_final_norm(config);
        for (size_t layer = 0; layer < config->num_hidden_layers && !norm; layer++) {
            norm = param == fs_llama_param(config, layer, FS_ROLE_NORM1) ||
                   param == fs_llama_param(config, layer, FS_ROLE_NORM2);
        }
        return (initial){0.0, norm ? 1.0f : 0.0f};
    }
    for (size_t layer = 0; layer < config->num_hidden_layers; layer++) {
        /* Projections into the residual stream, which adds up 2 of them per layer. */
        if (param == fs_llama_param(config, layer, FS_ROLE_O) ||
            param == fs_llama_param(config, layer, FS_ROLE_DOWN)) {
            return (initial){std / sqrt(2.0 * (double)config->num_hidden_layers), 0.0f};
        }
    }
    return (initial){std, 0.0f};
}

static fs_status
init_segment(fs_llama *llama, const fs_seg *seg, uint64_t seed, double std, float *chunk)
{
    const fs_exec *exec = fs_world_host_exec(llama->world); /* fs_store takes the host's memory */
    initial values = initial_of(llama, seg->param, std);
    for (size_t begin = seg->begin; begin < seg->end; begin += CHUNK_N) {
        size_t n = fs_min_size(seg->end - begin, CHUNK_N);
        if (values.std > 0.0) {
            fs_normal normal = {.seed = seed,
                                .stream = (uint64_t)seg->param,
                                .first = begin,
                                .n = n,
                                .std = (float)values.std,
                                .out = chunk};
            exec->device->model.normal(exec, &normal);
        } else {
            for (size_t i = 0; i < n; i++) {
                chunk[i] = values.constant;
            }
        }
        FS_TRY(fs_store(llama->shards, seg->param, FS_MASTER, begin, begin + n, chunk, FS_F32));
    }
    return FS_OK;
}

static fs_status
init_kept(fs_llama *llama, uint64_t seed, double std, float *chunk)
{
    int keep = fs_shards_policy(llama->shards)->keep;
    int first = fs_world_rank(llama->world) / keep * keep;
    for (int cut = first; cut < first + keep; cut++) {
        for (fs_seg_range s = fs_segs(llama->layout, cut, -1); s.seg < s.end; s.seg++) {
            FS_TRY(init_segment(llama, s.seg, seed, std, chunk));
        }
    }
    return FS_OK;
}

fs_status
fs_llama_init(fs_llama *llama, uint64_t seed, double std)
{
    if (!(std >= 0.0 && std < 1e30)) {
        return FS_FAIL(FS_EINVAL,
                       "the initial standard deviation is %g: it must be finite and at "
                       "least 0",
                       std);
    }
    float *chunk;
    FS_TRY(fs_calloc(CHUNK_N, sizeof *chunk, &chunk));
    fs_status st;
    FS_TRY_GOTO(fs_store_begin(llama->shards), st, done);
    FS_TRY_GOTO(init_kept(llama, seed, std, chunk), st, done);
    st = fs_store_end(llama->shards);
done:
    fs_free(chunk);
    return st;
}
