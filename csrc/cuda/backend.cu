/* The device table of a GPU, and the library's one entry.
 *
 * Each operation is one call of kernels.h or model.h on exec's stream of exec's context. What a
 * call reports is kept there (fs_runtime.check); after a failure nothing more is given. */
#include "common.cuh"

extern "C" {
#include "../base/build.h"
#include "../device/plugin.h"
#include "attention.h"
#include "model.h"
}

#include "context.cuh"

// ---- whole arrays -------------------------------------------------------------------------------

static void
convert(const fs_exec *exec, void *dst, fs_dtype dst_dtype, const void *src, fs_dtype src_dtype,
        size_t n)
{
    fs_cuda_give(exec, [=](fs_cuda_stream stream) {
        return fs_cuda_convert(stream, dst, dst_dtype, src, src_dtype, n);
    });
}

static void
split(const fs_exec *exec, uint16_t *bf16, uint16_t *remainder, const void *src, fs_dtype src_dtype,
      size_t n)
{
    fs_cuda_give(exec, [=](fs_cuda_stream stream) {
        return fs_cuda_split(stream, bf16, remainder, src, src_dtype, n);
    });
}

static void
join(const fs_exec *exec, void *dst, fs_dtype dst_dtype, const uint16_t *bf16,
     const uint16_t *remainder, size_t n)
{
    fs_cuda_give(exec, [=](fs_cuda_stream stream) {
        return fs_cuda_join(stream, dst, dst_dtype, bf16, remainder, n);
    });
}

static void
sum(const fs_exec *exec, const fs_sum *op)
{
    fs_cuda_give(exec, [=](fs_cuda_stream stream) {
        size_t nbytes;
        void *scratch = fs_cuda_exec_scratch(exec, &nbytes);
        return fs_cuda_sum(stream, op, scratch, nbytes);
    });
}

static void
sumsq(const fs_exec *exec, const void *x, fs_dtype dtype, size_t n, fs_sums *found)
{
    fs_cuda_give(exec, [=](fs_cuda_stream stream) {
        size_t nbytes;
        void *scratch = fs_cuda_exec_scratch(exec, &nbytes);
        return fs_cuda_sumsq(stream, x, dtype, n, found, scratch, nbytes);
    });
}

static void
find_nonfinite(const fs_exec *exec, const void *x, fs_dtype dtype, size_t n, uint64_t *out)
{
    fs_cuda_give(exec, [=](fs_cuda_stream stream) {
        return fs_cuda_find_nonfinite(stream, x, dtype, n, out);
    });
}

static void
update(const fs_exec *exec, const fs_update *op)
{
    fs_cuda_give(exec, [=](fs_cuda_stream stream) { return fs_cuda_update(stream, op); });
}

static void
combine(const fs_exec *exec, int op, fs_dtype dtype, void *acc, const void *src, size_t n)
{
    fs_cuda_give(exec, [=](fs_cuda_stream stream) {
        return fs_cuda_combine(stream, op, dtype, acc, src, n);
    });
}

// ---- the model's --------------------------------------------------------------------------------

/* A function of the table over one of model.h. */
template <typename Op, fs_status (*call)(fs_cuda_stream, const Op *)>
static void
row(const fs_exec *exec, const Op *op)
{
    fs_cuda_give(exec, [=](fs_cuda_stream stream) { return call(stream, op); });
}

// ---- products -----------------------------------------------------------------------------------

/* One product, or several: the context's handle for the stream does them. */
static void
multiply(const fs_exec *exec, const fs_gemm *products, size_t n)
{
    fs_cuda_give(exec, [=](fs_cuda_stream stream) {
        (void)stream; /* the handle's */
        fs_cublas *cublas;
        FS_TRY(fs_cuda_exec_cublas(exec, &cublas));
        return fs_cuda_gemms(cublas, products, n);
    });
}

static void
gemm(const fs_exec *exec, const fs_gemm *product)
{
    multiply(exec, product, 1);
}

// ---- the table and the entry --------------------------------------------------------------------

static fs_device
make_table(void)
{
    fs_device table = {};
    table.magic = FS_DEVICE_MAGIC;
    table.abi = FS_DEVICE_ABI;
    table.struct_nbytes = (uint32_t)sizeof table;
    table.build_id = FS_BUILD_ID;
    table.name = "cuda";
    table.runtime = &fs_cuda_runtime;
    table.copy = fs_cuda_runtime.copy;
    table.convert = convert;
    table.split = split;
    table.join = join;
    table.sum = sum;
    table.update = update;
    table.sumsq = sumsq;
    table.find_nonfinite = find_nonfinite;
    table.combine = combine;
    table.gemm = gemm;
    table.gemms = multiply;
    table.model.embed = row<fs_embed, fs_cuda_embed>;
    table.model.embed_grad = row<fs_embed_grad, fs_cuda_embed_grad>;
    table.model.norm = row<fs_norm, fs_cuda_norm>;
    table.model.norm_grad = row<fs_norm_grad, fs_cuda_norm_grad>;
    table.model.heads = row<fs_heads, fs_cuda_heads>;
    table.model.heads_grad = row<fs_heads, fs_cuda_heads_grad>;
    table.model.attention = row<fs_attention, fs_cuda_attention>;
    table.model.attention_grad = row<fs_attention, fs_cuda_attention_grad>;
    table.model.swiglu = row<fs_swiglu, fs_cuda_swiglu>;
    table.model.swiglu_grad = row<fs_swiglu, fs_cuda_swiglu_grad>;
    table.model.xent = row<fs_xent, fs_cuda_xent>;
    table.model.column_sum = row<fs_column_sum, fs_cuda_column_sum>;
    table.model.normal = row<fs_normal, fs_cuda_normal>;
    table.model.scale = row<fs_scale, fs_cuda_scale>;
    return table;
}

extern "C" __attribute__((visibility("default"))) const fs_device *
fs_plugin_get(const fs_plugin_host *host)
{
    static const fs_device table = make_table();
    if (host != NULL && host->abi == FS_PLUGIN_ABI && host->struct_nbytes == sizeof *host) {
        fs_status_share(host->status_here);
        fs_cuda_set_libraries(&host->libraries);
    }
    return &table;
}
