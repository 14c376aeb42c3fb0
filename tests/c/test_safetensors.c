/* Hostile safetensors headers: every truncation, every flipped bit, and the classic lies. */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "base/arena.h"
#include "check.h"
#include "base/crc32c.h"
#include "io/json.h"
#include "io/safetensors.h"

static char folder[] = "/tmp/fs_safetensors_XXXXXX";
static char path[256];

static void
write_file(const void *bytes, size_t nbytes)
{
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL, "%s", path);
    CHECK(fwrite(bytes, 1, nbytes, file) == nbytes, "%s", path);
    CHECK(fclose(file) == 0, "%s", path);
}

/* Opens bytes as a file; closes again. The message must name the path. */
static fs_status
try_file(const void *bytes, size_t nbytes, size_t *out_tensors_n)
{
    fs_reader reader;
    fs_safetensors found;
    write_file(bytes, nbytes);
    CHECK_OK(fs_reader_open(NULL, path, NULL, NULL, &reader));
    fs_status st = fs_safetensors_open(&reader, NULL, &found);
    if (st == FS_OK) {
        if (out_tensors_n != NULL) {
            *out_tensors_n = found.tensors_n;
        }
        /* What was promised must hold whatever the bytes were. */
        size_t total = 0;
        for (size_t t = 0; t < found.tensors_n; t++) {
            const fs_tensor *tensor = &found.tensors[t];
            CHECK(tensor->begin >= found.data_begin && tensor->begin <= tensor->end &&
                  tensor->end <= nbytes, "%zu", t);
            CHECK(fs_safetensors_find(&found, tensor->name) == tensor, "%s", tensor->name);
            total += tensor->end - tensor->begin;
        }
        CHECK(total == nbytes - found.data_begin, "%zu", total);
        fs_safetensors_close(&found);
    } else {
        CHECK(st == FS_ECORRUPT, "status %d", (int)st);
        CHECK(strstr(fs_status_message(), path) != NULL, "%s", fs_status_message());
    }
    fs_reader_close(&reader);
    return st;
}

/* A file of this header and data_n zero bytes. */
static fs_status
try_header(const char *json, size_t data_n, size_t *out_tensors_n)
{
    unsigned char bytes[4096] = {0};
    size_t n = strlen(json);
    CHECK(8 + n + data_n <= sizeof bytes, "%zu", n);
    bytes[0] = (unsigned char)(n & 0xff);
    bytes[1] = (unsigned char)(n >> 8);
    memcpy(bytes + 8, json, n);
    return try_file(bytes, 8 + n + data_n, out_tensors_n);
}

static void
test_lies(void)
{
    static const struct {
        const char *json;
        size_t data_n;
    } wrong[] = {
        {"", 0},
        {" {}", 0},
        {"[]", 0},
        {"{} x", 0},
        {"{\"a\":1}", 0},
        {"{\"a\":{}}", 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8},
        {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8},
        {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}}", 8},
        {"{\"a\":{\"dtype\":\"F33\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8},
        {"{\"a\":{\"dtype\":\"F32\\u0000\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[-8,0]}}", 8},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[16,8]}}", 16},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,16]}}", 16},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", 8},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[\"0\",\"8\"]}}", 8},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0.5,8]}}", 8},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8e0]}}", 8},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[true,8]}}", 8},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[00,8]}}", 8},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,8]}}", 8},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 7},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 9},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}", 12},
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", 1},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[18446744073709551616],\"data_offsets\":[0,0]}}", 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387905,4],\"data_offsets\":[0,16]}}",
         16},
        {"{\"a\":{\"dtype\":\"F64\",\"shape\":[2305843009213693952],\"data_offsets\":[0,0]}}", 0},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,18446744073709551615]}}", 1},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
         8},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}",
         12},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[12,20]}}",
         20},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
         "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,16]}}",
         16},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
         "\"\\u0061\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,16]}}",
         16},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},}", 8},
        {"{\"__metadata__\":{\"k\":1}}", 0},
        {"{\"__metadata__\":{\"k\":\"v\",\"k\":\"w\"}}", 0},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0},
        {"{\"a\\u0000b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8},
        {"{\"a\\ud800\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8},
        {"{\"a\\udc00\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8},
        {"{\"a\\x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8},
        {"{\"a\xff\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8},
        {"{\"a\xc0\x80\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8},
        {"{\"a\xed\xa0\x80\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8},
        {"{\"a\n\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,"
         "1,1,"
         "1,1,1,1,1],\"data_offsets\":[0,1]}}",
         1},
        {"{}", 1},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK(try_header(wrong[i].json, wrong[i].data_n, NULL) == FS_ECORRUPT, "accepted: %s",
              wrong[i].json);
    }
}

static void
test_legal(void)
{
    size_t n = 9;
    CHECK_OK(try_header("{}", 0, &n));
    CHECK(n == 0, "%zu", n);
    CHECK_OK(try_header("{\"__metadata__\":{\"k\":\"v\"}}  \n", 0, &n));
    CHECK(n == 0, "%zu", n);
    CHECK_OK(try_header("{\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
                        "\"e\":{\"dtype\":\"I64\",\"shape\":[3,0],\"data_offsets\":[4,4]},"
                        "\"\":{\"data_offsets\" : [4 , 5],\"dtype\":\"I8\",\"shape\":[1]},"
                        "\"\\u00e9\\ud83d\\ude00\\\"\":{\"dtype\":\"F4\",\"shape\":[2],"
                        "\"data_offsets\":[5,6]}}", 6, &n));
    CHECK(n == 4, "%zu", n);
}

/* The first 8 bytes lie about the length of the header. */
static void
test_lengths(void)
{
    static const uint64_t lies[] = {UINT64_MAX, UINT64_MAX - 2, UINT64_MAX - 7, (uint64_t)1 << 63,
                                    100000001u, 100000000u, 11, 10, 3, 1, 0};
    unsigned char bytes[18] = {0};
    memcpy(bytes + 8, "{}        ", 10);
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        for (int b = 0; b < 8; b++) {
            bytes[b] = (unsigned char)(lies[i] >> (8 * b));
        }
        fs_status expected = lies[i] == 10 ? FS_OK : FS_ECORRUPT;
        CHECK(try_file(bytes, sizeof bytes, NULL) == expected, "%llu", (unsigned long long)lies[i]);
    }
}

static size_t
make_sample(unsigned char *bytes, size_t capacity, size_t *out_header_nbytes)
{
    static const size_t dims_a[] = {2, 3}, dims_b[] = {5};
    static const fs_tensor_def defs[] = {
        {"layers.0.weight", FS_F32, 2, dims_a},
        {"b\"\\\xc3\xa9", FS_BF16, 1, dims_b},
        {"scalar", FS_U8, 0, NULL},
    };
    static const fs_text_pair metadata[] = {{"format", "pt\n"}};
    fs_header header;
    CHECK_OK(fs_header_make(defs, 3, metadata, 1, &header));
    CHECK(header.nbytes % 64 == 0 && header.data_nbytes == 35, "%zu %zu", header.nbytes,
          header.data_nbytes);
    CHECK(header.nbytes + header.data_nbytes <= capacity, "%zu", header.nbytes);
    memcpy(bytes, header.bytes, header.nbytes);
    for (size_t i = 0; i < header.data_nbytes; i++) {
        bytes[header.nbytes + i] = (unsigned char)i;
    }
    size_t n = header.nbytes + header.data_nbytes;
    *out_header_nbytes = header.nbytes;
    fs_header_free(&header);
    return n;
}

static void
test_truncation_and_flips(void)
{
    unsigned char bytes[1024], damaged[1024];
    size_t header_nbytes, tensors_n = 0;
    size_t n = make_sample(bytes, sizeof bytes, &header_nbytes);
    CHECK_OK(try_file(bytes, n, &tensors_n));
    CHECK(tensors_n == 3, "%zu", tensors_n);
    for (size_t cut = 0; cut < n; cut++) {
        CHECK(try_file(bytes, cut, NULL) == FS_ECORRUPT, "cut at %zu accepted", cut);
    }
    /* A flipped bit may give another legal header; it must never be read out of bounds. */
    size_t refused = 0;
    for (size_t bit = 0; bit < 8 * header_nbytes; bit++) {
        memcpy(damaged, bytes, n);
        damaged[bit / 8] ^= (unsigned char)(1u << (bit % 8));
        refused += try_file(damaged, n, NULL) != FS_OK;
    }
    CHECK(refused > 4 * header_nbytes, "%zu of %zu flips refused", refused, 8 * header_nbytes);
    /* With block checksums every one of them is found. */
    uint32_t crc = fs_crc32c(0, bytes, n);
    fs_blocks blocks = {.nbytes = n, .n = 1, .crc = &crc};
    for (size_t bit = 0; bit <= 8 * n; bit++) {
        fs_reader reader;
        fs_safetensors found;
        memcpy(damaged, bytes, n);
        if (bit < 8 * n) {
            damaged[bit / 8] ^= (unsigned char)(1u << (bit % 8));
        }
        write_file(damaged, n);
        CHECK_OK(fs_reader_open(NULL, path, &blocks, NULL, &reader));
        fs_status st = fs_safetensors_open(&reader, NULL, &found);
        if (bit < 8 * n) {
            CHECK(st == FS_ECORRUPT && reader.bad_block == 0, "flip of bit %zu not found", bit);
        } else {
            CHECK_OK(st);
            fs_safetensors_close(&found);
        }
        fs_reader_close(&reader);
    }
}

static void
test_refused_headers(void)
{
    static const size_t one[] = {1}, huge[] = {(size_t)1 << 62, 8};
    static const fs_tensor_def twice[] = {{"a", FS_F32, 1, one}, {"a", FS_F32, 1, one}};
    static const fs_tensor_def narrow_first[] = {{"a", FS_U8, 1, one}, {"b", FS_F32, 1, one}};
    static const fs_tensor_def control[] = {{"a\n", FS_F32, 1, one}};
    static const fs_tensor_def latin1[] = {{"\xe9", FS_F32, 1, one}};
    static const fs_tensor_def reserved[] = {{"__metadata__", FS_F32, 1, one}};
    static const fs_tensor_def overflow[] = {{"a", FS_F32, 2, huge}};
    fs_header header;
    CHECK_STATUS(fs_header_make(twice, 2, NULL, 0, &header), FS_EINVAL);
    CHECK_STATUS(fs_header_make(narrow_first, 2, NULL, 0, &header), FS_EINVAL);
    CHECK_STATUS(fs_header_make(control, 1, NULL, 0, &header), FS_EINVAL);
    CHECK_STATUS(fs_header_make(latin1, 1, NULL, 0, &header), FS_EINVAL);
    CHECK_STATUS(fs_header_make(reserved, 1, NULL, 0, &header), FS_EINVAL);
    CHECK_STATUS(fs_header_make(overflow, 1, NULL, 0, &header), FS_EINVAL);
    CHECK_OK(fs_header_make(NULL, 0, NULL, 0, &header));
    CHECK(header.data_nbytes == 0 && header.nbytes == 64, "%zu", header.nbytes);
    fs_header_free(&header);
}

/* Each allocation fails once: no leak, no crash, and the failure is told. */
static void
test_allocations(void)
{
    unsigned char bytes[1024];
    size_t header_nbytes, n = make_sample(bytes, sizeof bytes, &header_nbytes);
    write_file(bytes, n);
    for (size_t nth = 1;; nth++) {
        fs_reader reader;
        fs_safetensors found;
        (void)fs_alloc_fail_at(nth);
        fs_status st = fs_reader_open(NULL, path, NULL, NULL, &reader);
        if (st == FS_OK) {
            st = fs_safetensors_open(&reader, NULL, &found);
            if (st == FS_OK) {
                fs_safetensors_close(&found);
            }
            fs_reader_close(&reader);
        }
        if (st == FS_OK) {
            CHECK(nth > 5, "only %zu allocations", nth);
            break;
        }
        CHECK(st == FS_ENOMEM, "%d", (int)st);
    }
    (void)fs_alloc_fail_at(0);
}

int
main(void)
{
    CHECK(mkdtemp(folder) != NULL, "%s", folder);
    (void)snprintf(path, sizeof path, "%s/a.safetensors", folder);
    test_legal();
    test_lies();
    test_lengths();
    test_truncation_and_flips();
    test_refused_headers();
    test_allocations();
    (void)unlink(path);
    (void)rmdir(folder);
    return 0;
}
