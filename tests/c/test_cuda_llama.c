// needs: c++
// stand-in only
/* The native model over the table of a GPU, run by the stand-in for CUDA's runtime, against the
 * CPU's table on the same weights: losses, gradients of every parameter, logits, generation.
 *
 * Bounds, of the norm of a difference over the norm. In fp32 both sides round sums in an order of
 * their own, each by a few 2^-24: 1e-5 is far above. In 16 bits every stored activation and
 * gradient is rounded once, by at most u (2^-8 for bf16, 2^-11 for fp16), where the CPU has fp32
 * and the same 16-bit weights. Between a weight and the loss and back lie about 12 stored arrays a
 * layer each way, 60 with the head; roundings are independent, and add up to sqrt(60) u, less than
 * 8 u; what they pass through may make them larger: 20 u. A stride or a dtype that is wrong is
 * wrong by all of it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../cudasim/sim.h"
#include "check.h"
#include "comm/comm.h"
#include "cuda/device.h"
#include "device/plugin.h"
#include "models.h"

const fs_device *fs_plugin_get(const fs_plugin_host *host);

enum { VOCAB = 53, PARAMS_MAX = 64, SHORT = 19 };

typedef struct result {
    double loss[2]; /* of forward alone, of forward and backward */
    float *grads[PARAMS_MAX];
    size_t grads_n[PARAMS_MAX];
    int params_n;
    float logits[BATCH * SHORT * VOCAB], generated[BATCH * VOCAB];
} result;

typedef struct way {
    int model;
    fs_dtype param, reduce;
    bool checkpointing;
    bool forward;      /* also forward alone, and generation */
    int rounds;        /* micro-batches of a step */
} way;

static fs_exec cpu, gpu;
static fs_device cpu_table;

static fs_shards *
open_shards(fs_world *world, const way *how)
{
    fs_llama_config config = config_of(how->model);
    fs_llama_defs defs;
    fs_layout *layout;
    fs_shards *shards;
    CHECK_OK(fs_llama_define(&config, &defs));
    CHECK_OK(fs_layout_make(defs.params, defs.params_n, defs.units, defs.units_n, 1,
                            FS_PARTITION_FLAT, false, &layout));
    fs_llama_defs_free(&defs);
    fs_policy policy = {.keep = 1,
                        .weights = FS_WEIGHTS_SHARD,
                        .pool_units = 2,
                        .precision = {.param = how->param,
                                      .reduce = how->reduce,
                                      .accumulate = FS_F32,
                                      .master = how->param == FS_F32 ? FS_MASTERS_NONE
                                                                     : FS_MASTERS_SEPARATE,
                                      .moments = FS_F32}};
    CHECK_OK(fs_shards_open(world, layout, &policy, &shards));
    return shards;
}

/* The last tokens' logits out of a cache that was filled in pieces. */
static void
generate(fs_llama *llama, const int32_t *tokens, float *out)
{
    static const size_t pieces[] = {SHORT - 7, 1, 6};
    int32_t piece[BATCH * SHORT];
    size_t at = 0;
    CHECK_OK(fs_llama_cache_begin(llama, BATCH, SHORT));
    for (size_t p = 0; p < sizeof pieces / sizeof pieces[0]; at += pieces[p], p++) {
        for (size_t b = 0; b < BATCH; b++) {
            memcpy(piece + b * pieces[p], tokens + b * SHORT + at, pieces[p] * sizeof *piece);
        }
        CHECK_OK(fs_llama_cache_extend(llama, piece, pieces[p], out));
    }
}

static void
run_in(fs_world *world, const way *how, result *out)
{
    fs_llama *llama;
    fs_loss loss;
    fs_verdict verdict;
    int32_t tokens[BATCH * LENGTH], targets[BATCH * LENGTH]; /* of which SHORT are used */
    fs_llama_config config = config_of(how->model);
    fs_shards *shards = open_shards(world, how);
    CHECK_OK(fs_llama_open(&config, shards, how->checkpointing, &llama));
    CHECK_OK(fs_shards_open_moments(shards, 1));
    CHECK_OK(fs_llama_init(llama, 5, 0.3));
    fill(tokens, targets, 0);
    if (how->forward) {
        CHECK_OK(
            fs_llama_forward(llama, tokens, targets, BATCH, SHORT, false, out->logits, &loss));
        out->loss[0] = loss.sum / (double)loss.tokens;
        generate(llama, tokens, out->generated);
        fs_llama_cache_end(llama);
    }
    for (int round = 0; round < how->rounds; round++) {
        fill(tokens, targets, round);
        CHECK_OK(
            fs_llama_forward_backward(llama, tokens, targets, BATCH, SHORT, -1, false, &loss));
    }
    out->loss[1] = loss.sum / (double)loss.tokens;
    CHECK_OK(fs_step_agree(shards, 0.0, FS_NORM_2, false, &verdict));
    CHECK(verdict.applied, "reason %d", (int)verdict.reason);
    const fs_layout *layout = fs_shards_layout(shards);
    CHECK(layout->params_n <= PARAMS_MAX, "%d parameters", layout->params_n);
    out->params_n = layout->params_n;
    for (int p = 0; p < layout->params_n; p++) {
        size_t n = out->grads_n[p] = layout->params[p].numel;
        out->grads[p] = malloc(n * sizeof(float));
        CHECK(out->grads[p] != NULL, "%zu elements", n);
        CHECK_OK(fs_load(shards, p, FS_GRAD, 0, n, out->grads[p], FS_F32));
    }
    fs_llama_close(llama);
    fs_shards_close(shards);
}

static result *
run(const fs_exec *exec, const way *how)
{
    static const fs_deadlines deadlines = {60.0, 30.0};
    result *out = calloc(1, sizeof *out);
    fs_job *job;
    fs_world *world;
    CHECK(out != NULL, "no memory");
    CHECK_OK(fs_job_threads(1, &job));
    CHECK_OK(fs_world_open(job, 0, exec, &deadlines, &world));
    run_in(world, how, out);
    fs_world_close(world);
    fs_job_close(job);
    return out;
}

static void
drop(result *r)
{
    for (int p = 0; p < r->params_n; p++) {
        free(r->grads[p]);
    }
    free(r);
}

/* Norm of got - want over that of want. */
static void
check_near(const char *what, int index, const way *how, const float *got, const float *want,
           size_t n, double bound)
{
    double off = 0.0, whole = 0.0;
    for (size_t i = 0; i < n; i++) {
        off += pow((double)got[i] - (double)want[i], 2.0);
        whole += pow((double)want[i], 2.0);
    }
    CHECK(whole > 0.0 && sqrt(off) <= bound * sqrt(whole), /* also where off is not a number */
          "model %d, %s: %s %d is off by %.3g of %.3g", how->model, fs_dtype_name(how->param),
          what, index, sqrt(off), sqrt(whole));
}

static void
check_result(const way *how, const result *got, const result *want, double bound)
{
    for (int i = 0; i < 2; i++) {
        CHECK(fabs(got->loss[i] - want->loss[i]) <= bound * want->loss[i],
              "model %d, %s: loss %.9g, not %.9g", how->model, fs_dtype_name(how->param),
              got->loss[i], want->loss[i]);
    }
    if (how->forward) {
        check_near("logits", 0, how, got->logits, want->logits, BATCH * SHORT * VOCAB, bound);
        check_near("generated", 0, how, got->generated, want->generated, BATCH * VOCAB, bound);
    }
    for (int p = 0; p < want->params_n; p++) {
        check_near("gradient", p, how, got->grads[p], want->grads[p], want->grads_n[p], bound);
    }
}

static void
check_same(const way *how, const result *got, const result *want)
{
    CHECK(got->loss[1] == want->loss[1], "loss %.17g, not %.17g", got->loss[1], want->loss[1]);
    for (int p = 0; p < want->params_n; p++) {
        CHECK(memcmp(got->grads[p], want->grads[p], want->grads_n[p] * sizeof(float)) == 0,
              "model %d, %s: gradient %d depends on checkpointing", how->model,
              fs_dtype_name(how->param), p);
    }
}

static void
test_model(int model, fs_dtype param, fs_dtype reduce, double bound)
{
    bool fp32 = param == FS_F32;
    way how = {.model = model, .param = param, .reduce = reduce, .rounds = fp32 ? 1 : 2,
               .forward = !fp32 || model == 0};
    result *want = run(&cpu, &how), *got = run(&gpu, &how);
    check_result(&how, got, want, bound);
    if (fp32) {
        how.checkpointing = true;
        how.forward = false;
        result *again = run(&gpu, &how);
        check_same(&how, again, got);
        drop(again);
    }
    drop(want);
    drop(got);
}

int
main(void)
{
    fs_plugin_host host = {FS_PLUGIN_ABI, sizeof host, fs_status_here, {NULL, NULL}};
    const fs_device *found;
    CHECK_OK(fs_device_cpu(FS_ISA_BASELINE, &found));
    cpu_table = *found;
    cpu_table.gemm = plain_gemm;
    cpu_table.gemms = plain_gemms;
    cpu.device = &cpu_table;
    gpu.device = fs_plugin_get(&host);
    CHECK_OK(gpu.device->runtime->context_open(0, &gpu.context));
    for (int model = 0; model < MODELS; model++) {
        fs_sim_reset((uint64_t)model + 1, model == 1 ? FS_SIM_LATE : FS_SIM_SHUFFLED,
                     (size_t)1 << 28);
        test_model(model, FS_F32, FS_F32, 1e-5);
    }
    test_model(1, FS_BF16, FS_F32, 20 * 0x1p-8);
    test_model(2, FS_BF16, FS_BF16, 20 * 0x1p-8);
    test_model(0, FS_F16, FS_F16, 20 * 0x1p-11);
    gpu.device->runtime->context_close(gpu.context);
    CHECK(fs_cuda_memory_held() == 0, "%zu bytes are still held", fs_cuda_memory_held());
    return 0;
}
