/* Operations of cuda_ops on a model's rows, which memory bounds: norm_grad and column_sum rows,
 * width; xent rows, vocab; embed_grad rows, width, vocab; heads and heads_grad batch, length,
 * q_heads, kv_heads, head_dim. Activations are bf16.
 *
 * verify runs the CPU's table in fp32 on the same inputs: kernels compute in fp32 and round once,
 * so what they store has the bits of its results, rounded. */
#include "cuda_ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/math.h"

static fs_norm_grad norm;
static fs_column_sum columns;
static fs_xent xent;
static fs_embed_grad embed;
static fs_heads heads;

/* A device array of bf16 against fp32 results. Frees want. */
static void
same_rounded(const char *what, const void *device, float *want, size_t n)
{
    uint16_t *got = host(2 * n), *rounded = host(2 * n);
    b.cpu.device->convert(&b.cpu, rounded, FS_BF16, want, FS_F32, n);
    fetch(got, device, 2 * n);
    same(what, got, rounded, 2 * n);
    free(got);
    free(rounded);
    free(want);
}

/* A device array of fp32 against results. Frees want. */
static void
same_f32(const char *what, const void *device, float *want, size_t n)
{
    float *got = fetch_f32(device, n, FS_F32);
    same(what, got, want, n * sizeof *got);
    free(got);
    free(want);
}

// ---- norm_grad ----------------------------------------------------------------------------------

static void
run_norm(bench *at)
{
    at->exec.device->model.norm_grad(&at->exec, &norm);
}

static void
verify_norm(bench *at)
{
    size_t n = norm.rows * norm.width;
    fs_norm_grad cpu = norm;
    float *x = fetch_f32(norm.x, n, FS_BF16), *rstd = fetch_f32(norm.rstd, norm.rows, FS_F32);
    float *weight = fetch_f32(norm.weight, norm.width, FS_BF16);
    float *partial = host(FS_NORM_CHUNKS * norm.width * sizeof *partial);
    cpu.dtype = FS_F32;
    cpu.x = x;
    cpu.rstd = rstd;
    cpu.weight = weight;
    cpu.partial = partial;
    cpu.dy = fetch_f32(norm.dy, n, FS_BF16);
    cpu.dx = fetch_f32(norm.dx, n, FS_BF16);
    cpu.dweight = host(norm.width * sizeof *cpu.dweight);
    at->cpu.device->model.norm_grad(&at->cpu, &cpu);
    run_norm(at);
    same_rounded("norm_grad: dx differs from the CPU's", norm.dx, cpu.dx, n);
    same_rounded("norm_grad: rows made again differ from the CPU's", norm.dy, cpu.dy, n);
    same_f32("norm_grad: dweight differs from the CPU's", norm.dweight, cpu.dweight, norm.width);
    free(x);
    free(rstd);
    free(weight);
    free(partial);
}

/* As between a layer's halves: the gradient is added to the residual's. */
static void
open_norm(size_t rows, size_t width)
{
    norm = (fs_norm_grad){.rows = rows, .width = width, .dtype = FS_BF16, .dx_add = true};
    norm.x = drawn("rows", rows * width, FS_BF16, 1, 1.0f);
    norm.rstd = drawn("sizes", rows, FS_F32, 2, 1.0f);
    norm.weight = drawn("weights", width, FS_BF16, 3, 1.0f);
    norm.dy = drawn("gradients", rows * width, FS_BF16, 4, 1.0f);
    norm.dx = drawn("the residual's gradients", rows * width, FS_BF16, 5, 1.0f);
    norm.dweight = room("the weights' gradients", width * sizeof(float));
    norm.partial = room("parts of sums", FS_NORM_CHUNKS * width * sizeof(float));
    b.run = run_norm;
    b.verify = verify_norm;
}

// ---- column_sum ---------------------------------------------------------------------------------

static void
run_columns(bench *at)
{
    at->exec.device->model.column_sum(&at->exec, &columns);
}

static void
verify_columns(bench *at)
{
    fs_column_sum cpu = columns;
    float *x = fetch_f32(columns.x, columns.rows * columns.width, FS_BF16);
    cpu.dtype = FS_F32;
    cpu.x = x;
    cpu.out = host(columns.width * sizeof *cpu.out);
    at->cpu.device->model.column_sum(&at->cpu, &cpu);
    run_columns(at);
    same_f32("sums of columns differ from the CPU's", columns.out, cpu.out, columns.width);
    free(x);
}

static void
open_columns(size_t rows, size_t width)
{
    columns = (fs_column_sum){.rows = rows, .width = width, .stride = width, .dtype = FS_BF16};
    columns.x = drawn("gradients", rows * width, FS_BF16, 1, 1.0f);
    columns.out = room("sums", width * sizeof(float));
    b.run = run_columns;
    b.verify = verify_columns;
}

// ---- xent ---------------------------------------------------------------------------------------

static void
run_xent(bench *at)
{
    at->exec.device->model.xent(&at->exec, &xent);
}

static void
verify_xent(bench *at)
{
    size_t n = xent.rows * xent.vocab;
    fs_xent cpu = xent;
    int32_t *targets = host(xent.rows * sizeof *targets);
    double *got = host(xent.rows * sizeof *got), *want = host(xent.rows * sizeof *want);
    fetch(targets, xent.targets, xent.rows * sizeof *targets);
    cpu.logits = fetch_f32(xent.logits, n, FS_F32);
    cpu.dlogits = cpu.logits;
    cpu.dtype = FS_F32;
    cpu.targets = targets;
    cpu.loss = want;
    at->cpu.device->model.xent(&at->cpu, &cpu);
    run_xent(at);
    same_rounded("gradients of logits differ from the CPU's", xent.dlogits, cpu.logits, n);
    fetch(got, xent.loss, xent.rows * sizeof *got);
    same("losses differ from the CPU's", got, want, xent.rows * sizeof *got);
    free(targets);
    free(got);
    free(want);
}

/* A row an id of 0 to below vocab. */
static int32_t *
draw_ids(size_t rows, size_t vocab)
{
    int32_t *ids = host(rows * sizeof *ids);
    for (size_t r = 0; r < rows; r++) {
        ids[r] = (int32_t)(fs_mix_u64(r + 1) % vocab);
    }
    return ids;
}

static void
open_xent(size_t rows, size_t vocab)
{
    int32_t *targets = draw_ids(rows, vocab);
    xent = (fs_xent){.rows = rows, .vocab = vocab, .scale = 1.0f, .dtype = FS_BF16,
                     .factor = 1.0f};
    xent.logits = drawn("logits", rows * vocab, FS_F32, 1, 8.0f);
    xent.targets = upload("targets", targets, rows * sizeof *targets);
    xent.dlogits = room("gradients", rows * vocab * 2);
    xent.loss = room("losses", rows * sizeof(double));
    b.run = run_xent;
    b.verify = verify_xent;
    free(targets);
}

// ---- embed_grad ---------------------------------------------------------------------------------

static void
run_embed(bench *at)
{
    at->exec.device->model.embed_grad(&at->exec, &embed);
}

static void
verify_embed(bench *at)
{
    size_t first_n = (embed.vocab + 1) * sizeof(int32_t), rows_n = embed.rows * sizeof(int32_t);
    fs_embed_grad cpu = embed;
    float *dy = fetch_f32(embed.dy, embed.rows * embed.width, FS_BF16);
    int32_t *first = host(first_n), *sorted = host(rows_n);
    fetch(first, embed.first, first_n);
    fetch(sorted, embed.sorted, rows_n);
    cpu.dtype = FS_F32;
    cpu.dy = dy;
    cpu.first = first;
    cpu.sorted = sorted;
    cpu.dtable = host(embed.vocab * embed.width * sizeof *cpu.dtable);
    at->cpu.device->model.embed_grad(&at->cpu, &cpu);
    run_embed(at);
    same_f32("gradients of the table differ from the CPU's", embed.dtable, cpu.dtable,
             embed.vocab * embed.width);
    free(dy);
    free(first);
    free(sorted);
}

static void
open_embed(size_t rows, size_t width, size_t vocab)
{
    int32_t *ids = draw_ids(rows, vocab), *sorted = host(rows * sizeof *sorted);
    int32_t *first = host((vocab + 1) * sizeof *first);
    fs_sort_rows(ids, rows, vocab, first, sorted);
    embed = (fs_embed_grad){.rows = rows, .width = width, .vocab = vocab, .scale = 1.0f,
                            .dtype = FS_BF16};
    embed.dy = drawn("gradients", rows * width, FS_BF16, 1, 1.0f);
    embed.dtable = room("the table's gradients", vocab * width * sizeof(float));
    embed.first = upload("first rows", first, (vocab + 1) * sizeof *first);
    embed.sorted = upload("sorted rows", sorted, rows * sizeof *sorted);
    b.run = run_embed;
    b.verify = verify_embed;
    free(ids);
    free(sorted);
    free(first);
}

// ---- heads --------------------------------------------------------------------------------------

static void
run_heads(bench *at)
{
    if (at->backward) {
        at->exec.device->model.heads_grad(&at->exec, &heads);
    } else {
        at->exec.device->model.heads(&at->exec, &heads);
    }
}

static void
verify_heads(bench *at)
{
    size_t tokens = heads.batch * heads.length, table = heads.length * (heads.head_dim / 2);
    size_t q_n = tokens * heads.q_heads * heads.padded_dim;
    size_t k_n = tokens * heads.kv_heads * heads.padded_dim;
    size_t rows_n = tokens * (heads.q_heads + 2 * heads.kv_heads) * heads.head_dim;
    fs_heads cpu = heads;
    float *cosines = fetch_f32(heads.cosines, table, FS_F32);
    float *sines = fetch_f32(heads.sines, table, FS_F32);
    float *rows = fetch_f32(heads.rows, rows_n, FS_BF16), *q = fetch_f32(heads.q, q_n, FS_BF16);
    float *k = fetch_f32(heads.k, k_n, FS_BF16), *v = fetch_f32(heads.v, k_n, FS_BF16);
    cpu.dtype = FS_F32;
    cpu.cosines = cosines;
    cpu.sines = sines;
    cpu.rows = rows;
    cpu.q = q;
    cpu.k = k;
    cpu.v = v;
    if (at->backward) {
        at->cpu.device->model.heads_grad(&at->cpu, &cpu);
    } else {
        at->cpu.device->model.heads(&at->cpu, &cpu);
    }
    run_heads(at);
    same_rounded("rows of heads differ from the CPU's", heads.rows, rows, rows_n);
    same_rounded("queries differ from the CPU's", heads.q, q, q_n);
    same_rounded("keys differ from the CPU's", heads.k, k, k_n);
    same_rounded("values differ from the CPU's", heads.v, v, k_n);
    free(cosines);
    free(sines);
}

static void
open_heads(size_t batch, size_t length, size_t q_heads, size_t kv_heads, size_t head_dim,
           bool backward)
{
    size_t dim = fs_padded_dim(head_dim), tokens = batch * length;
    if (dim != head_dim) {
        die("head_dim: a multiple of 16");
    }
    b.backward = backward;
    heads = (fs_heads){.batch = batch, .length = length, .q_heads = q_heads,
                       .kv_heads = kv_heads, .head_dim = head_dim, .padded_dim = dim,
                       .kv_rows = length, .dtype = FS_BF16,
                       .q_scale = 1.0f / sqrtf((float)head_dim)};
    heads.cosines = drawn("cosines", length * (dim / 2), FS_F32, 1, 1.0f);
    heads.sines = drawn("sines", length * (dim / 2), FS_F32, 2, 1.0f);
    heads.rows = drawn("rows", tokens * (q_heads + 2 * kv_heads) * dim, FS_BF16, 3, 1.0f);
    heads.q = drawn("queries", tokens * q_heads * dim, FS_BF16, 4, 1.0f);
    heads.k = drawn("keys", tokens * kv_heads * dim, FS_BF16, 5, 1.0f);
    heads.v = drawn("values", tokens * kv_heads * dim, FS_BF16, 6, 1.0f);
    b.run = run_heads;
    b.verify = verify_heads;
}

bool
open_rows(const char *what, int argc, char **argv)
{
#define OPTION(name) option(argc, argv, #name)
    if (strcmp(what, "norm_grad") == 0) {
        open_norm(OPTION(rows), OPTION(width));
    } else if (strcmp(what, "column_sum") == 0) {
        open_columns(OPTION(rows), OPTION(width));
    } else if (strcmp(what, "xent") == 0) {
        open_xent(OPTION(rows), OPTION(vocab));
    } else if (strcmp(what, "embed_grad") == 0) {
        open_embed(OPTION(rows), OPTION(width), OPTION(vocab));
    } else if (strcmp(what, "heads") == 0 || strcmp(what, "heads_grad") == 0) {
        open_heads(OPTION(batch), OPTION(length), OPTION(q_heads), OPTION(kv_heads),
                   OPTION(head_dim), strcmp(what, "heads_grad") == 0);
    } else {
        return false;
    }
#undef OPTION
    return true;
}
