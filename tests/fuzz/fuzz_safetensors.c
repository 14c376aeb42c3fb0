/* The reader of safetensors headers.
 *
 * Input: '=' and a whole file; or any other byte b and a header, to which the length in front and b
 * zero bytes of data behind are added. */
#include "fuzz.h"

#include "base/status.h"
#include "io/safetensors.h"

/* Bits of an element by another table than the reader's: digits in the name, or these. */
static size_t
bits_of(const char *dtype)
{
    if (strcmp(dtype, "BOOL") == 0) {
        return 8;
    }
    size_t digits = strcspn(dtype, "0123456789");
    return (size_t)atoi(dtype + digits);
}

static void
check(const fs_safetensors *found, size_t nbytes)
{
    size_t total = 0;
    for (size_t t = 0; t < found->tensors_n; t++) {
        const fs_tensor *tensor = &found->tensors[t];
        PROMISE(tensor->begin >= found->data_begin && tensor->begin <= tensor->end);
        PROMISE(tensor->end <= nbytes);
        PROMISE(tensor->dims_n <= FS_SAFETENSORS_DIMS_MAX);
        size_t numel = 1;
        for (size_t d = 0; d < tensor->dims_n; d++) {
            PROMISE(!__builtin_mul_overflow(numel, tensor->dims[d], &numel));
        }
        PROMISE(numel == tensor->numel);
        PROMISE(numel * bits_of(tensor->dtype_name) == 8 * (tensor->end - tensor->begin));
        PROMISE(fs_safetensors_find(found, tensor->name) == tensor);
        PROMISE(t == 0 || strcmp(found->tensors[t - 1].name, tensor->name) < 0);
        for (const char *c = tensor->name; *c != '\0'; c++) {
            PROMISE((unsigned char)*c >= 0x20 && *c != 0x7f);
        }
        total += tensor->end - tensor->begin;
    }
    PROMISE(total == nbytes - found->data_begin);
    for (size_t m = 1; m < found->metadata_n; m++) {
        PROMISE(strcmp(found->metadata[m - 1].key, found->metadata[m].key) < 0);
    }
}

/* Only the header, in memory of exactly its size. */
static void
parse(const uint8_t *header, size_t header_nbytes, size_t data_nbytes)
{
    char *text = malloc(header_nbytes > 0 ? header_nbytes : 1);
    fs_safetensors found;
    PROMISE(text != NULL);
    memcpy(text, header, header_nbytes);
    fs_status st = fs_safetensors_parse("fuzz", text, header_nbytes, data_nbytes, &found);
    PROMISE(st == FS_OK || st == FS_ECORRUPT);
    if (st == FS_OK) {
        check(&found, 8 + header_nbytes + data_nbytes);
        fs_safetensors_close(&found);
    } else {
        PROMISE(strstr(fs_status_message(), "fuzz") != NULL);
    }
    free(text);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes)
{
    static int fd = -1;
    if (nbytes == 0 || nbytes > FS_FUZZ_NBYTES_MAX) {
        return 0;
    }
    size_t total;
    if (data[0] == '=') {
        total = nbytes - 1;
        fuzz_file(&fd, data + 1, nbytes - 1, "", 0, 0);
    } else {
        const uint64_t header_nbytes = nbytes - 1; /* little-endian, as the format */
        total = 8 + nbytes - 1 + data[0];
        parse(data + 1, nbytes - 1, data[0]);
        fuzz_file(&fd, &header_nbytes, 8, data + 1, nbytes - 1, data[0]);
    }
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    fs_reader reader;
    fs_safetensors found;
    PROMISE(fs_reader_open(NULL, path, NULL, NULL, &reader) == FS_OK);
    fs_status st = fs_safetensors_open(&reader, NULL, &found);
    PROMISE(st == FS_OK || st == FS_ECORRUPT);
    if (st == FS_OK) {
        check(&found, total);
        fs_safetensors_close(&found);
    } else {
        PROMISE(strstr(fs_status_message(), path) != NULL);
    }
    fs_reader_close(&reader);
    return 0;
}
