/* Instructions that C++ has no word for, each as one function: products of a warp's fragments on
 * tensor cores, loads of fragments, asynchronous copies, conversion of pairs, 2^x. They need
 * compute capability 8.0.
 *
 * Where there is no GPU each has a twin for the plain C++ compiler that does what the instruction's
 * description in the PTX ISA says, lane by lane: which element of which matrix a lane's register
 * holds is what can be wrong, and is the same on both sides. All lanes of a warp call a function
 * together, but for those that say otherwise.
 *
 * A lane is g * 4 + t with g < 8 and t < 4. Of 16-bit elements two lie in a register, the one of
 * lower index in the lower half. Fragments of m16n8k16:
 *   A (16 x 16): a[0] row g, a[1] row g + 8, columns 2t and 2t + 1; a[2], a[3] the same, columns
 *     + 8.
 *   B (16 x 8):  b[0] rows 2t and 2t + 1 of column g; b[1] the same + 8 rows.
 *   C (16 x 8):  c[0], c[1] row g, columns 2t and 2t + 1; c[2], c[3] row g + 8. */
#ifndef FS_CUDA_TENSOR_CORE_CUH
#define FS_CUDA_TENSOR_CORE_CUH

#include "common.cuh"

#define FS_WARP 32u
#define FS_WHOLE_WARP 0xffffffffu

#ifdef __CUDACC__

FS_DEVICE_FN uint32_t
fs_shared_address(const void *at)
{
    return (uint32_t)__cvta_generic_to_shared(at);
}

/* c += a * b, bf16 in, fp32 sums. */
FS_DEVICE_FN void
fs_mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* c += a * b, fp16 in, fp32 sums. */
FS_DEVICE_FN void
fs_mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Four 8 x 8 matrices of 16-bit elements from shared memory: lane 8m + i gives the address of row i
 * of matrix m (16 bytes, aligned to 16); x[m] is then row g of it, columns 2t and 2t + 1. */
FS_DEVICE_FN void
fs_ldmatrix(uint32_t x[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(fs_shared_address(row))
                 : "memory");
}

/* The same, but x[m] is column g, rows 2t and 2t + 1. */
FS_DEVICE_FN void
fs_ldmatrix_turned(uint32_t x[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(fs_shared_address(row))
                 : "memory");
}

/* For the calling lane: 16 bytes from global to shared memory, both aligned to 16, or 16 zeros
 * where the source (which must be an address all the same) is not there. Over when its group is. */
FS_DEVICE_FN void
fs_copy_16(void *shared, const void *global, bool is_there)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(fs_shared_address(shared)), "l"(__cvta_generic_to_global(global)),
                   "r"(is_there ? 16 : 0)
                 : "memory");
}

/* The calling lane's copies since the last group are a group. */
FS_DEVICE_FN void
fs_copy_group(void)
{
    asm volatile("cp.async.commit_group;" : : : "memory");
}

/* Waits until at most PENDING of the calling lane's latest groups are not over. */
template <int PENDING>
FS_DEVICE_FN void
fs_copy_wait(void)
{
    asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}

/* Both rounded to nearest even, low in the lower half. The calling lane's alone. */
FS_DEVICE_FN uint32_t
fs_pair_bf16(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

FS_DEVICE_FN uint32_t
fs_pair_f16(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* 2^x within 2^-22 of it; subnormal in or out is 0. The calling lane's alone. */
FS_DEVICE_FN float
fs_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#else // the twins: what the PTX ISA says of each, for the plain C++ compiler

struct fs_lane_fragments {
    uint32_t a[4], b[2];
};

/* Widens the halves of a register to columns or rows 2t and 2t + 1 of 16. */
template <typename F>
FS_DEVICE_FN void
fs_widen_pair(float *to, uint32_t pair, F widen)
{
    to[0] = widen((uint16_t)pair);
    to[1] = widen((uint16_t)(pair >> 16));
}

template <typename F>
FS_DEVICE_FN void
fs_mma_twin(float c[4], const uint32_t a[4], const uint32_t b[2], F widen)
{
    fs_lane_fragments mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    const fs_sim_shown *seen =
        fs_sim_warp_show(FS_WHOLE_WARP, &mine, sizeof mine, __FILE__, __LINE__);
    unsigned g = fs_sim_lane() / 4, t = fs_sim_lane() % 4;
    float rows[2][16], columns[2][16]; /* g and g + 8; 2t and 2t + 1 */
    for (unsigned l = 0; l < 4; l++) {
        fs_lane_fragments row;
        memcpy(&row, &seen[g * 4 + l], sizeof row);
        for (unsigned i = 0; i < 4; i++) {
            fs_widen_pair(rows[i % 2] + i / 2 * 8 + 2 * l, row.a[i], widen);
        }
        for (unsigned column = 0; column < 2; column++) {
            fs_lane_fragments other;
            memcpy(&other, &seen[(2 * t + column) * 4 + l], sizeof other);
            fs_widen_pair(columns[column] + 2 * l, other.b[0], widen);
            fs_widen_pair(columns[column] + 8 + 2 * l, other.b[1], widen);
        }
    }
    for (unsigned i = 0; i < 4; i++) {
        for (unsigned k = 0; k < 16; k++) {
            c[i] += rows[i / 2][k] * columns[i % 2][k];
        }
    }
}

FS_DEVICE_FN void
fs_mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    fs_mma_twin(c, a, b, fs_f32_of_bf16_raw);
}

FS_DEVICE_FN void
fs_mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    fs_mma_twin(c, a, b, fs_f32_of_f16);
}

/* What each lane gave as its row: 16 bytes of the block's shared memory. */
FS_DEVICE_FN const fs_sim_shown *
fs_show_row(const void *row)
{
    fs_sim_check_shared(row, 16, 16);
    return fs_sim_warp_show(FS_WHOLE_WARP, &row, sizeof row, __FILE__, __LINE__);
}

FS_DEVICE_FN uint32_t
fs_half_at(const fs_sim_shown *seen, unsigned lane, unsigned column)
{
    const uint16_t *row;
    memcpy(&row, &seen[lane], sizeof row);
    return row[column];
}

FS_DEVICE_FN void
fs_ldmatrix(uint32_t x[4], const void *row)
{
    const fs_sim_shown *seen = fs_show_row(row);
    unsigned g = fs_sim_lane() / 4, t = fs_sim_lane() % 4;
    for (unsigned m = 0; m < 4; m++) {
        x[m] = fs_half_at(seen, 8 * m + g, 2 * t) | fs_half_at(seen, 8 * m + g, 2 * t + 1) << 16;
    }
}

FS_DEVICE_FN void
fs_ldmatrix_turned(uint32_t x[4], const void *row)
{
    const fs_sim_shown *seen = fs_show_row(row);
    unsigned g = fs_sim_lane() / 4, t = fs_sim_lane() % 4;
    for (unsigned m = 0; m < 4; m++) {
        unsigned lane = 8 * m + 2 * t;
        x[m] = fs_half_at(seen, lane, g) | fs_half_at(seen, lane + 1, g) << 16;
    }
}

FS_DEVICE_FN void
fs_copy_16(void *shared, const void *global, bool is_there)
{
    fs_sim_check_shared(shared, 16, 16);
    fs_sim_copy_async(shared, global, is_there ? 16 : 0, is_there ? 0 : 16);
}

FS_DEVICE_FN void
fs_copy_group(void)
{
    fs_sim_copies_commit();
}

template <int PENDING>
FS_DEVICE_FN void
fs_copy_wait(void)
{
    fs_sim_copies_wait(PENDING);
}

FS_DEVICE_FN uint32_t
fs_pair_bf16(float low, float high)
{
    return fs_bf16_of_f32(low) | (uint32_t)fs_bf16_of_f32(high) << 16;
}

FS_DEVICE_FN uint32_t
fs_pair_f16(float low, float high)
{
    return fs_f16_of_f32(low) | (uint32_t)fs_f16_of_f32(high) << 16;
}

FS_DEVICE_FN float
fs_exp2(float x)
{
    float y = std::exp2(x);
    return y < 0x1p-126f ? 0.0f : y;
}

#endif

#endif
