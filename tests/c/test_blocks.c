// flavours: neon
/* Whole reads and writes over calls that are short, interrupted or refused; blocks; checksums. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "check.h"

// ---- a system that moves at most 1000 bytes a call, and is interrupted every third
// -----------------

static bool shy;
static unsigned calls;
static size_t device_room = SIZE_MAX; /* bytes that may still be written */
static size_t free_nbytes;            /* what statvfs says, when not 0 */

static bool
interrupted(void)
{
    if (shy && ++calls % 3 == 0) {
        errno = EINTR;
        return true;
    }
    return false;
}

static ssize_t
test_pread(int fd, void *out, size_t n, off_t at)
{
    return interrupted() ? -1 : pread(fd, out, shy && n > 1000 ? 1000 : n, at);
}

static ssize_t
test_pwrite(int fd, const void *bytes, size_t n, off_t at)
{
    if (interrupted()) {
        return -1;
    }
    n = shy && n > 1000 ? 1000 : n;
    if (device_room == 0) {
        errno = ENOSPC;
        return -1;
    }
    n = n < device_room ? n : device_room;
    ssize_t done = pwrite(fd, bytes, n, at);
    if (done > 0 && device_room != SIZE_MAX) {
        device_room -= (size_t)done;
    }
    return done;
}

static int
test_fsync(int fd)
{
    return interrupted() ? -1 : fsync(fd);
}

static int
test_statvfs(const char *path, struct statvfs *out)
{
    int rc = statvfs(path, out);
    if (rc == 0 && free_nbytes != 0) {
        out->f_bavail = free_nbytes / out->f_frsize;
    }
    return rc;
}

#define pread test_pread
#define pwrite test_pwrite
#define fsync test_fsync
#define statvfs(path, out) test_statvfs(path, out)
#include "io/file.c" /* this copy is linked, over the calls above, instead of the library's */
#undef pread
#undef pwrite
#undef fsync
#undef statvfs

#include "io/blocks.h"
#include "base/crc32c.h"

static char folder[] = "/tmp/fs_blocks_XXXXXX";

static void
forget(const char *name)
{
    char path[256];
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    CHECK(unlink(path) == 0, "%s", path);
}

/* Bytes that differ from place to place and block to block. */
static unsigned char
byte_at(size_t i)
{
    return (unsigned char)(i * 2654435761u >> 13 ^ i >> 20);
}

static void
test_crc(void)
{
    static unsigned char bytes[5000];
    CHECK(fs_crc32c(0, "123456789", 9) == 0xe3069283u, "the check value of the standard");
    CHECK(fs_crc32c_table(0, "123456789", 9) == 0xe3069283u, "the check value of the standard");
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = byte_at(i);
    }
    for (size_t begin = 0; begin < 9; begin++) {
        for (size_t n = 0; n < 300; n++) {
            CHECK(fs_crc32c(7, bytes + begin, n) == fs_crc32c_table(7, bytes + begin, n),
                  "%zu bytes at %zu", n, begin);
        }
    }
    static unsigned char
        more[4 * 24576 + 100]; /* three stretches at once, several times, and a rest */
    for (size_t i = 0; i < sizeof more; i++) {
        more[i] = byte_at(i);
    }
    for (size_t n = 24570; n <= sizeof more; n += n < 24582 ? 1 : 8191) {
        CHECK(fs_crc32c(3, more, n) == fs_crc32c_table(3, more, n), "%zu bytes", n);
    }
    uint32_t whole = fs_crc32c(0, bytes, sizeof bytes);
    for (size_t cut = 0; cut < sizeof bytes; cut += 97) {
        uint32_t crc = fs_crc32c(fs_crc32c(0, bytes, cut), bytes + cut, sizeof bytes - cut);
        CHECK(crc == whole, "cut at %zu", cut);
    }
}

/* Writes n bytes in uneven portions, reads them back in uneven ranges. */
static void
round_trip(size_t n, size_t portion)
{
    static unsigned char bytes[1 << 16];
    fs_ledger ledger = {0};
    fs_writer writer;
    fs_blocks blocks = {0};
    CHECK_OK(fs_writer_open(folder, "w", &ledger, &writer));
    for (size_t at = 0; at < n;) {
        size_t m = portion < n - at ? portion : n - at;
        for (size_t i = 0; i < m; i++) {
            bytes[i] = byte_at(at + i);
        }
        CHECK_OK(fs_writer_put(&writer, bytes, m));
        at += m;
    }
    CHECK(ledger.nbytes[FS_HOME_PRIVATE][FS_MEM_CHECKPOINT] == FS_WRITER_NBYTES,
          "buffers are charged");
    CHECK_OK(fs_writer_finish(&writer, &blocks));
    CHECK(ledger.nbytes[FS_HOME_PRIVATE][FS_MEM_CHECKPOINT] == 0, "and given back");
    fs_writer_discard(&writer);
    CHECK(blocks.nbytes == n && blocks.n == fs_blocks_count(n), "%zu %zu", blocks.nbytes, blocks.n);
    fs_reader reader;
    CHECK_OK(fs_reader_open(folder, "w", &blocks, &ledger, &reader));
    CHECK(reader.file.nbytes == n, "%zu bytes in the file, %zu written", reader.file.nbytes, n);
    size_t step = n < 100000 ? 777 : 777777;
    for (size_t begin = 0; begin <= n; begin += step) {
        const unsigned char *got;
        size_t end = begin + 3 * step < n ? begin + 3 * step : n;
        CHECK_OK(fs_reader_get(&reader, begin, end, &got));
        for (size_t i = begin; i < end; i += 1 + (end - begin) / 1000) {
            CHECK(got[i - begin] == byte_at(i), "byte %zu", i);
        }
    }
    /* Backwards: the window may not believe that it holds what it has dropped. */
    for (size_t end = n; end > step; end -= step) {
        const unsigned char *got;
        CHECK_OK(fs_reader_get(&reader, end - step, end, &got));
        CHECK(got[0] == byte_at(end - step) && got[step - 1] == byte_at(end - 1), "before %zu",
              end);
    }
    fs_reader_close(&reader);
    CHECK(ledger.nbytes[FS_HOME_PRIVATE][FS_MEM_CHECKPOINT] == 0, "buffers are given back");
    fs_blocks_free(&blocks);
    forget("w");
}

static void
test_lengths(void)
{
    static const size_t lengths[] = {0, 1, 511, 512, 513, 5000, 4096 * 3 + 700, FS_BLOCK_NBYTES - 1,
                                     FS_BLOCK_NBYTES, FS_BLOCK_NBYTES + 1, FS_WRITER_NBYTES - 1,
                                     FS_WRITER_NBYTES, FS_WRITER_NBYTES + 1,
                                     3 * FS_WRITER_NBYTES + FS_BLOCK_NBYTES / 2 + 3};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        round_trip(lengths[i], 60007);
    }
    shy = true;
    round_trip(3 * FS_BLOCK_NBYTES + 4321, 999);
    shy = false;
    CHECK(calls > 6000, "%u calls were short or interrupted", calls);
}

static void
test_end_of_file(void)
{
    fs_file file;
    char bytes[64] = {0};
    CHECK_OK(fs_file_create(folder, "short", &file));
    CHECK_OK(fs_file_write(&file, 0, 64, bytes));
    CHECK_STATUS(fs_file_read(&file, 1, 64, bytes), FS_ECORRUPT);
    CHECK(strstr(fs_status_message(), "/short: unexpected end of file at byte 64") != NULL, "%s",
          fs_status_message());
    CHECK_STATUS(fs_file_read(&file, SIZE_MAX - 8, 64, bytes), FS_ECORRUPT);
    CHECK_STATUS(fs_file_create(folder, "short", &(fs_file){0}), FS_ESYS);
    CHECK(fs_status_errno() == EEXIST, "%s", fs_status_message());
    CHECK_OK(fs_file_close(&file));
    forget("short");
}

static void
test_full_device(void)
{
    for (size_t room = 0; room < 3 * FS_BLOCK_NBYTES; room += FS_BLOCK_NBYTES - 1) {
        static unsigned char bytes[3 * FS_BLOCK_NBYTES];
        fs_writer writer;
        fs_blocks blocks = {0};
        CHECK_OK(fs_writer_open(folder, "full", NULL, &writer));
        device_room = room;
        CHECK_OK(fs_writer_put(&writer, bytes, sizeof bytes));
        CHECK_STATUS(fs_writer_finish(&writer, &blocks), FS_ESYS);
        CHECK(fs_status_errno() == ENOSPC, "%s", fs_status_message());
        CHECK(strstr(fs_status_message(), "/full: ") != NULL, "%s", fs_status_message());
        device_room = SIZE_MAX;
        fs_writer_discard(&writer);
        forget("full");
    }
    free_nbytes = 1 << 20;
    CHECK_OK(fs_room_check(folder, 1 << 20));
    CHECK_STATUS(fs_room_check(folder, (1 << 20) + 1), FS_ESYS);
    CHECK(fs_status_errno() == ENOSPC, "%s", fs_status_message());
    free_nbytes = 0;
}

static void
test_what_is_no_file(void)
{
    char path[256];
    fs_file file;
    (void)snprintf(path, sizeof path, "%s/pipe", folder);
    CHECK(mkfifo(path, 0600) == 0, "%s", path);
    CHECK_STATUS(fs_file_open(folder, "pipe", &file), FS_ECORRUPT); /* and does not wait */
    forget("pipe");
    CHECK_STATUS(fs_file_open(NULL, folder, &file), FS_ECORRUPT);
    CHECK_STATUS(fs_file_open(folder, "none", &file), FS_ESYS);
    CHECK(fs_status_errno() == ENOENT, "%s", fs_status_message());
    static const char *const bad[] = {"",    "..",          ".",    ".hidden", "../a",
                                      "a/b", "/etc/passwd", "a\\b", "a\nb"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK_STATUS(fs_name_check("index.json", bad[i]), FS_ECORRUPT);
    }
    CHECK_OK(fs_name_check("index.json", "model-00001-of-00002.safetensors"));
}

static void
test_damaged_block(void)
{
    fs_writer writer;
    fs_blocks blocks = {0};
    fs_reader reader;
    const unsigned char *got;
    static unsigned char bytes[3 * FS_BLOCK_NBYTES];
    CHECK_OK(fs_writer_open(folder, "d", NULL, &writer));
    CHECK_OK(fs_writer_put(&writer, bytes, sizeof bytes));
    CHECK_OK(fs_file_write(&writer.file, 0, 1, bytes));
    CHECK_OK(fs_writer_finish(&writer, &blocks));
    blocks.crc[1] ^= 1u;
    CHECK_OK(fs_reader_open(folder, "d", &blocks, NULL, &reader));
    CHECK_OK(fs_reader_get(&reader, 0, 100, &got));
    CHECK_STATUS(fs_reader_get(&reader, FS_BLOCK_NBYTES - 1, FS_BLOCK_NBYTES + 1, &got),
                 FS_ECORRUPT);
    CHECK(reader.bad_block == 1, "%zu", reader.bad_block);
    CHECK_OK(fs_reader_get(&reader, 2 * FS_BLOCK_NBYTES, 3 * FS_BLOCK_NBYTES, &got));
    CHECK_STATUS(fs_reader_get(&reader, FS_BLOCK_NBYTES, FS_BLOCK_NBYTES + 1, &got), FS_ECORRUPT);
    fs_reader_close(&reader);
    blocks.nbytes--;
    CHECK_STATUS(fs_reader_open(folder, "d", &blocks, NULL, &reader), FS_ECORRUPT);
    fs_blocks_free(&blocks);
    forget("d");
}

int
main(void)
{
    CHECK(mkdtemp(folder) != NULL, "%s", folder);
    test_crc();
    test_lengths();
    test_end_of_file();
    test_full_device();
    test_what_is_no_file();
    test_damaged_block();
    CHECK(rmdir(folder) == 0, "files were left in %s", folder);
    return 0;
}
