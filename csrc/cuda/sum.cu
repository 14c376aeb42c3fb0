/* Sums: over ranks, of squares; and the search for what is not finite.
 *
 * The grid of partial sums is the CPU's (device/reduce.inc): a partial per tile of FS_TILE_N
 * elements with FS_LANES lanes, element i in lane i mod FS_LANES, lanes folded in halves, partials
 * added in index order by groups. So norms have the CPU's bits. A block takes several tiles: all
 * threads add up the sources, leaving the sums in shared memory, then a thread per lane squares and
 * adds, in order; then a block a group adds its partials, and a last one the groups. */
#include "elements.cuh"

#define SUM_THREADS 256u
#define SUM_TILES 4u
#define SUM_SPAN ((size_t)SUM_TILES * FS_TILE_N)
/* Between tiles of shared memory, so that the lanes of two tiles lie in different banks. */
#define SUM_PAD FS_LANES
#define SUM_LANES (SUM_TILES * FS_LANES)
/* More elements than that are searched for a bad source by a grid of their own. */
#define SEARCH_N ((size_t)1 << 18)
#define SEARCH_BLOCKS 256u

static_assert(FS_GROUP_TILES == SUM_THREADS, "a thread a tile of a group");
static_assert(FS_TILE_N % (SUM_THREADS * FS_FOUR) == 0, "a turn of the block ends with a tile");

/* The launch's argument. partial and largest have an entry per tile. */
typedef struct fs_sum_args {
    const void *src[FS_CUDA_SOURCES_MAX]; /* those present, in rank order */
    uint16_t rank[FS_CUDA_SOURCES_MAX];   /* whose they are */
    unsigned src_n;
    fs_dtype src_dtype;
    void *acc; /* NULL: nothing is stored */
    fs_dtype acc_dtype;
    bool accumulate;
    size_t n;
    double *partial;
    uint64_t *largest; /* magnitudes of fp64: they order as the numbers do, NaN above all */
    fs_sums *found;    /* or NULL */
} fs_sum_args;

FS_DEVICE_FN size_t
min_device(size_t a, size_t b)
{
    return a < b ? a : b;
}

FS_DEVICE_FN uint64_t
magnitude_f64(double x)
{
    return fs_bits_of_f64(x) & 0x7fffffffffffffffu;
}

/* Sums of four elements in fp32, stored and as they were stored. */
FS_DEVICE_FN void
add_sources(const fs_sum_args *a, size_t at, unsigned n, float total[FS_FOUR])
{
    float x[FS_FOUR];
    for (unsigned i = 0; i < FS_FOUR; i++) {
        total[i] = 0.0f;
    }
    for (unsigned r = 0; r < a->src_n; r++) {
        if (r == 0) {
            fs_load_four(total, a->src[r], a->src_dtype, at, n);
            continue;
        }
        fs_load_four(x, a->src[r], a->src_dtype, at, n);
        for (unsigned i = 0; i < n; i++) {
            total[i] = total[i] + x[i];
        }
    }
}

FS_DEVICE_FN void
sum_four(const fs_sum_args *a, size_t at, unsigned n, float *judged)
{
    float total[FS_FOUR];
    add_sources(a, at, n, total);
    if (a->accumulate) {
        float base[FS_FOUR];
        fs_load_four(base, a->acc, a->acc_dtype, at, n);
        for (unsigned i = 0; i < n; i++) {
            total[i] = base[i] + total[i];
        }
    }
    if (a->acc != NULL) {
        fs_store_four(a->acc, a->acc_dtype, at, total, n);
        /* Judged is what was written: after rounding. */
        if (a->acc_dtype == FS_BF16) {
            for (unsigned i = 0; i < n; i++) {
                total[i] = fs_f32_of_bf16(fs_bf16_of_f32(total[i]));
            }
        } else if (a->acc_dtype == FS_F16) {
            for (unsigned i = 0; i < n; i++) {
                total[i] = fs_f32_of_f16(fs_f16_of_f32(total[i]));
            }
        }
    }
    for (unsigned i = 0; i < n; i++) {
        judged[i] = total[i];
    }
}

/* The same where sources or sums are fp64. */
FS_DEVICE_FN void
sum_four(const fs_sum_args *a, size_t at, unsigned n, double *judged)
{
    float narrow[FS_FOUR];
    if (a->src_dtype != FS_F64) {
        add_sources(a, at, n, narrow);
    }
    for (unsigned i = 0; i < n; i++) {
        double total = 0.0;
        if (a->src_dtype != FS_F64) {
            total = (double)narrow[i];
        } else {
            for (unsigned r = 0; r < a->src_n; r++) {
                double x = ((const double *)a->src[r])[at + i];
                total = r == 0 ? x : total + x;
            }
        }
        if (a->accumulate) {
            total = total + fs_load_f64(a->acc, a->acc_dtype, at + i);
        }
        if (a->acc != NULL) {
            fs_store_f64(a->acc, a->acc_dtype, at + i, total);
            total = fs_load_f64(a->acc, a->acc_dtype, at + i);
        }
        judged[i] = total;
    }
}

/* T: what is judged, float or double. */
template <typename T>
static __global__ void
sum_kernel(fs_sum_args args)
{
    const fs_sum_args *a = &args;
    T *tiles = (T *)(void *)fs_shared_memory();
    double *lanes = (double *)(void *)(tiles + SUM_TILES * (FS_TILE_N + SUM_PAD));
    uint64_t *largest = (uint64_t *)(void *)(lanes + SUM_LANES);
    unsigned tile = threadIdx.x / FS_LANES, lane = threadIdx.x % FS_LANES;
    for (size_t first = blockIdx.x * SUM_SPAN; first < a->n; first += gridDim.x * SUM_SPAN) {
        for (unsigned i = FS_FOUR * threadIdx.x; i < SUM_SPAN; i += FS_FOUR * SUM_THREADS) {
            if (first + i < a->n) {
                T *judged = tiles + i + i / FS_TILE_N * SUM_PAD;
                sum_four(a, first + i, fs_four_of(a->n, first + i), judged);
            }
        }
        __syncthreads();
        size_t begin = first + (size_t)tile * FS_TILE_N;
        if (threadIdx.x < SUM_LANES) {
            double sum = 0.0;
            uint64_t most = 0;
            size_t count = begin >= a->n ? 0 : min_device(a->n - begin, FS_TILE_N);
            const T *x = tiles + (size_t)tile * (FS_TILE_N + SUM_PAD);
            for (size_t i = lane; i < count; i += FS_LANES) {
                double value = (double)x[i];
                sum = sum + value * value;
                uint64_t magnitude = magnitude_f64(value);
                most = magnitude > most ? magnitude : most;
            }
            lanes[threadIdx.x] = sum;
            largest[threadIdx.x] = most;
        }
        __syncthreads();
        for (unsigned half = FS_LANES / 2; half > 0; half /= 2) {
            if (threadIdx.x < SUM_LANES && lane < half) {
                lanes[threadIdx.x] = lanes[threadIdx.x] + lanes[threadIdx.x + half];
                uint64_t other = largest[threadIdx.x + half];
                largest[threadIdx.x] = other > largest[threadIdx.x] ? other : largest[threadIdx.x];
            }
            __syncthreads();
        }
        if (threadIdx.x < SUM_LANES && lane == 0 && begin < a->n) {
            a->partial[begin / FS_TILE_N] = lanes[threadIdx.x];
            a->largest[begin / FS_TILE_N] = largest[threadIdx.x];
        }
        __syncthreads();
    }
}

/* The first source that is not finite, or -1; told to all threads of the block. Only looked for
 * where the sum is not finite either, so one block may do it. flag: shared, one entry. */
FS_DEVICE_FN int64_t
find_bad_source(const fs_sum_args *a, int *flag)
{
    for (unsigned r = 0; r < a->src_n; r++) {
        if (threadIdx.x == 0) {
            *flag = 0;
        }
        __syncthreads();
        for (size_t at = threadIdx.x; at < a->n; at += SUM_THREADS) {
            if (!fs_f64_is_finite(fs_load_f64(a->src[r], a->src_dtype, at))) {
                (void)atomicAdd(flag, 1);
                break;
            }
        }
        __syncthreads();
        bool bad = *flag != 0;
        __syncthreads();
        if (bad) {
            return (int64_t)a->rank[r];
        }
    }
    return -1;
}

/* A block a group of tiles: its partials in index order, by one thread out of shared memory; the
 * largest magnitude by all. Both go where those of the group's first tile were. */
static __global__ void
group_kernel(double *partial, uint64_t *largest, size_t n)
{
    double *chunk = (double *)(void *)fs_shared_memory();
    uint64_t *most = (uint64_t *)(void *)(chunk + SUM_THREADS);
    size_t stride = gridDim.x * FS_GROUP_TILES;
    for (size_t first = blockIdx.x * FS_GROUP_TILES; first < n; first += stride) {
        size_t at = first + threadIdx.x;
        chunk[threadIdx.x] = at < n ? partial[at] : 0.0;
        most[threadIdx.x] = at < n ? largest[at] : 0;
        __syncthreads();
        for (unsigned half = SUM_THREADS / 2; half > 0; half /= 2) {
            if (threadIdx.x < half && most[threadIdx.x + half] > most[threadIdx.x]) {
                most[threadIdx.x] = most[threadIdx.x + half];
            }
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            size_t count = min_device(n - first, FS_GROUP_TILES);
            double sum = 0.0;
            for (size_t i = 0; i < count; i++) {
                sum = sum + chunk[i];
            }
            partial[first] = sum;
            largest[first] = most[0];
        }
        __syncthreads();
    }
}

/* One block: n sums, each stride after the last, in index order, by one thread out of shared
 * memory; magnitudes by all. Looks for a bad source itself, or leaves 1 in largest[0] where
 * search_kernel is to. */
static __global__ void
finish_kernel(fs_sum_args args, size_t n, size_t stride, bool searches)
{
    const double *partial = args.partial;
    const uint64_t *largest = args.largest;
    double *chunk = (double *)(void *)fs_shared_memory();
    uint64_t *most = (uint64_t *)(void *)(chunk + SUM_THREADS);
    double sumsq = 0.0;
    uint64_t mine = 0;
    for (size_t first = 0; first < n; first += SUM_THREADS) {
        size_t at = first + threadIdx.x;
        chunk[threadIdx.x] = at < n ? partial[at * stride] : 0.0;
        mine = at < n && largest[at * stride] > mine ? largest[at * stride] : mine;
        __syncthreads();
        if (threadIdx.x == 0) {
            size_t count = min_device(n - first, SUM_THREADS);
            for (size_t i = 0; i < count; i++) {
                sumsq = sumsq + chunk[i];
            }
        }
        __syncthreads();
    }
    most[threadIdx.x] = mine;
    __syncthreads();
    for (unsigned half = SUM_THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half && most[threadIdx.x + half] > most[threadIdx.x]) {
            most[threadIdx.x] = most[threadIdx.x + half];
        }
        __syncthreads();
    }
    bool finite = fs_f64_is_finite(fs_f64_of_bits(most[0]));
    int64_t bad = -1;
    if (!finite && args.acc != NULL && searches) {
        bad = find_bad_source(&args, (int *)(void *)chunk);
    }
    if (threadIdx.x == 0) {
        fs_sums *found = args.found;
        bool known = args.accumulate && found->bad_source >= 0;
        found->sumsq = sumsq;
        found->absmax = fs_f64_of_bits(most[0]);
        found->finite = finite ? 1 : 0;
        found->bad_source = known ? found->bad_source : bad;
        if (!searches) {
            args.largest[0] = !finite && args.acc != NULL && !known ? 1 : 0;
        }
    }
}

/* The same search, by all blocks: the lowest rank wins, which -1 is above as it counts without a
 * sign. */
static __global__ void
search_kernel(fs_sum_args args)
{
    if (args.largest[0] == 0) {
        return;
    }
    size_t stride = (size_t)gridDim.x * blockDim.x;
    for (unsigned r = 0; r < args.src_n; r++) {
        for (size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x; at < args.n; at += stride) {
            if (!fs_f64_is_finite(fs_load_f64(args.src[r], args.src_dtype, at))) {
                (void)atomicMin((unsigned long long *)(void *)&args.found->bad_source,
                                (unsigned long long)args.rank[r]);
                return;
            }
        }
    }
}

extern "C" size_t
fs_cuda_sum_scratch_nbytes(size_t n)
{
    return fs_sum_scratch_nbytes(n);
}

/* From the partials of tiles to what was found. finding: what that touches. */
static fs_status
launch_finish(fs_cuda_stream stream, const fs_sum_args *args, size_t tiles,
              const fs_touched &finding, const char *what)
{
    size_t shared = SUM_THREADS * (sizeof(double) + sizeof(uint64_t));
    size_t groups = tiles / FS_GROUP_TILES + (tiles % FS_GROUP_TILES != 0);
    bool searches = args->n <= SEARCH_N;
    if (groups > 1) {
        FS_LAUNCH(group_kernel, fs_cuda_blocks(groups, 1), SUM_THREADS, shared, stream,
                  fs_touched()
                      .writes(args->partial, tiles * sizeof(double))
                      .writes(args->largest, tiles * sizeof(uint64_t)),
                  args->partial, args->largest, tiles);
        FS_TRY(fs_cuda_launched(what));
    }
    FS_LAUNCH(finish_kernel, 1, SUM_THREADS, shared, stream, finding, *args,
              groups > 1 ? groups : tiles, groups > 1 ? FS_GROUP_TILES : (size_t)1, searches);
    FS_TRY(fs_cuda_launched(what));
    if (!searches) {
        FS_LAUNCH(search_kernel, SEARCH_BLOCKS, SUM_THREADS, 0, stream, finding, *args);
    }
    return fs_cuda_launched(what);
}

/* args lacks partial and largest, which lie in scratch. */
static fs_status
launch_sum(fs_cuda_stream stream, fs_sum_args *args, void *scratch, size_t scratch_nbytes,
           const char *what)
{
    size_t needed = fs_cuda_sum_scratch_nbytes(args->n);
    size_t tiles = needed / (sizeof(double) + sizeof(uint64_t));
    bool wide = args->src_dtype == FS_F64 || args->acc_dtype == FS_F64;
    if (scratch_nbytes < needed) {
        return FS_FAIL(FS_EINVAL, "%s: %zu bytes of scratch for %zu elements, %zu are needed", what,
                       scratch_nbytes, args->n, needed);
    }
    args->partial = (double *)scratch;
    args->largest = (uint64_t *)scratch + tiles;
    fs_touched finding = fs_touched().writes(scratch, needed).writes(args->found, sizeof(fs_sums));
    if (args->n > 0) {
        size_t item = wide ? sizeof(double) : sizeof(float);
        size_t shared = item * SUM_TILES * (FS_TILE_N + SUM_PAD) +
                        SUM_LANES * (sizeof(double) + sizeof(uint64_t));
        size_t acc_nbytes = args->acc == NULL ? 0 : args->n * fs_dtype_nbytes(args->acc_dtype);
        fs_touched touched = fs_touched().writes(args->acc, acc_nbytes).writes(scratch, needed);
        for (unsigned r = 0; r < args->src_n; r++) {
            touched.reads(args->src[r], args->n * fs_dtype_nbytes(args->src_dtype));
            finding.reads(args->src[r], args->n * fs_dtype_nbytes(args->src_dtype));
        }
        auto kernel = wide ? sum_kernel<double> : sum_kernel<float>;
        FS_LAUNCH(kernel, fs_cuda_blocks(args->n, SUM_SPAN), SUM_THREADS, shared, stream, touched,
                  *args);
        FS_TRY(fs_cuda_launched(what));
    }
    return args->found == NULL ? FS_OK : launch_finish(stream, args, tiles, finding, what);
}

extern "C" fs_status
fs_cuda_sum(fs_cuda_stream stream, const fs_sum *sum, void *scratch, size_t scratch_nbytes)
{
    size_t nbytes;
    FS_TRY(fs_cuda_check_stream(stream, "sum"));
    FS_TRY(fs_cuda_check_float(sum->src_dtype, "sum", "of sources"));
    FS_TRY(fs_cuda_check_float(sum->acc_dtype, "sum", "of sums"));
    FS_TRY(fs_mul_size(sum->n, sizeof(double), &nbytes));
    if (sum->src_n > FS_CUDA_SOURCES_MAX) {
        return FS_FAIL(FS_EUNSUPPORTED, "sum: %zu sources, at most %d on a device", sum->src_n,
                       FS_CUDA_SOURCES_MAX);
    }
    fs_sum_args args;
    memset(&args, 0, sizeof args);
    for (size_t r = 0; r < sum->src_n; r++) {
        if (sum->src[r] != NULL) {
            args.rank[args.src_n] = (uint16_t)r;
            args.src[args.src_n++] = sum->src[r];
        }
    }
    args.src_dtype = sum->src_dtype;
    args.acc = sum->acc;
    args.acc_dtype = sum->acc_dtype;
    args.accumulate = sum->accumulate;
    args.n = sum->n;
    args.found = sum->found;
    return launch_sum(stream, &args, scratch, scratch_nbytes, "sum");
}

extern "C" fs_status
fs_cuda_sumsq(fs_cuda_stream stream, const void *x, fs_dtype dtype, size_t n, fs_sums *found,
              void *scratch, size_t scratch_nbytes)
{
    size_t nbytes;
    FS_TRY(fs_cuda_check_stream(stream, "sumsq"));
    FS_TRY(fs_cuda_check_float(dtype, "sumsq", "of the array"));
    FS_TRY(fs_mul_size(n, sizeof(double), &nbytes));
    fs_sum_args args;
    memset(&args, 0, sizeof args);
    args.src[0] = x;
    args.src_n = 1;
    args.src_dtype = dtype;
    args.acc_dtype = dtype == FS_F64 ? FS_F64 : FS_F32;
    args.n = n;
    args.found = found;
    return launch_sum(stream, &args, scratch, scratch_nbytes, "sumsq");
}

// ---- first element that is not finite -----------------------------------------------------------

static __global__ void
start_search_kernel(uint64_t *out, size_t n)
{
    *out = n;
}

static __global__ void
find_nonfinite_kernel(const void *x, fs_dtype dtype, size_t n, uint64_t *out)
{
    size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x; at < n; at += stride) {
        if (!fs_f64_is_finite(fs_load_f64(x, dtype, at))) {
            /* The smallest wins, whatever the order. */
            (void)atomicMin((unsigned long long *)(void *)out, (unsigned long long)at);
            return;
        }
    }
}

extern "C" fs_status
fs_cuda_find_nonfinite(fs_cuda_stream stream, const void *x, fs_dtype dtype, size_t n,
                       uint64_t *out)
{
    size_t nbytes;
    FS_TRY(fs_cuda_check_stream(stream, "find_nonfinite"));
    if ((int)dtype < 0 || dtype >= FS_DTYPE_COUNT) {
        return FS_FAIL(FS_ETYPE, "find_nonfinite: no dtype has number %d", (int)dtype);
    }
    FS_TRY(fs_mul_size(n, fs_dtype_nbytes(dtype), &nbytes));
    FS_LAUNCH(start_search_kernel, 1, 1, 0, stream, fs_touched().writes(out, sizeof *out), out, n);
    FS_TRY(fs_cuda_launched("find_nonfinite"));
    if (n == 0 || !fs_dtype_is_float(dtype)) {
        return FS_OK;
    }
    FS_LAUNCH(find_nonfinite_kernel, fs_cuda_blocks(n, SUM_THREADS), SUM_THREADS, 0, stream,
              fs_touched().reads(x, nbytes).writes(out, sizeof *out), x, dtype, n, out);
    return fs_cuda_launched("find_nonfinite");
}
