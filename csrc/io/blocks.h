/* Files in blocks of a MiB, each with its crc32c: written as the bytes go out, checked before any
 * byte of a block is used. The last block of a file may be short. */
#ifndef FS_IO_BLOCKS_H
#define FS_IO_BLOCKS_H

#include <stddef.h>
#include <stdint.h>

#include "../base/arena.h"
#include "../base/status.h"
#include "file.h"

#define FS_BLOCK_NBYTES ((size_t)1 << 20)

/* Size and checksums of a file, header included. */
typedef struct fs_blocks {
    size_t nbytes;
    size_t n; /* of crc: nbytes in blocks, rounded up */
    uint32_t *crc;
} fs_blocks;

/* Blocks of a file of nbytes; the last may be a part. */
size_t fs_blocks_count(size_t nbytes);

// ---- writing ------------------------------------------------------------------------------------

/* Bytes that wait to be written: whole blocks, so that a checksum is taken over memory once. */
#define FS_WRITER_NBYTES ((size_t)4 << 20)

typedef struct fs_writer {
    fs_file file;
    fs_arena arena;
    unsigned char *buffer;
    size_t used;   /* bytes in buffer */
    size_t at;     /* place in the file of buffer[0]; a multiple of FS_BLOCK_NBYTES */
    fs_blocks blocks;
    size_t blocks_capacity;
} fs_writer;

/* Creates folder/name. The buffer is charged to ledger as FS_MEM_CHECKPOINT until close. */
FS_NODISCARD fs_status
fs_writer_open(const char *folder, const char *name, fs_ledger *ledger, fs_writer *out);

/* Room for the next bytes: *out has *out_nbytes > 0 free bytes, written back by fs_writer_advance.
 * Both are multiples of 8 while all that was advanced before is. */
FS_NODISCARD fs_status
fs_writer_room(fs_writer *writer, unsigned char **out, size_t *out_nbytes);
void fs_writer_advance(fs_writer *writer, size_t nbytes);

/* Copies bytes to the file. */
FS_NODISCARD fs_status
fs_writer_put(fs_writer *writer, const void *bytes, size_t nbytes);

/* Writes what is left, syncs, closes, gives the buffer back. *out_blocks (free with fs_blocks_free)
 * describes the file. On failure the caller still calls fs_writer_discard. */
FS_NODISCARD fs_status
fs_writer_finish(fs_writer *writer, fs_blocks *out_blocks);

/* Gives everything back without finishing; the half file stays. Safe after finish and on zeros. */
void fs_writer_discard(fs_writer *writer);

/* Leaves zeros; fine on zeros. */
void fs_blocks_free(fs_blocks *blocks);

// ---- reading ------------------------------------------------------------------------------------

/* The most bytes that fs_reader_get gives at once. */
#define FS_READER_NBYTES ((size_t)4 << 20)

typedef struct fs_reader {
    fs_file file;
    const fs_blocks *blocks; /* NULL: a file without checksums */
    fs_arena arena;
    unsigned char *buffer;
    size_t begin, end;       /* bytes of the file that buffer holds, whole blocks, checked */
    size_t capacity;
    size_t bad_block;        /* after FS_ECORRUPT by a checksum: which block; else SIZE_MAX */
} fs_reader;

/* Opens folder/name. A size other than blocks->nbytes is FS_ECORRUPT. blocks must outlive the
 * reader. */
FS_NODISCARD fs_status
fs_reader_open(const char *folder, const char *name, const fs_blocks *blocks, fs_ledger *ledger,
               fs_reader *out);

/* Bytes [begin, end) of the file, at most FS_READER_NBYTES; valid until the next call, as aligned
 * as begin is. Reads whole blocks, checks each once, and keeps what overlaps the last call. */
FS_NODISCARD fs_status
fs_reader_get(fs_reader *reader, size_t begin, size_t end, const unsigned char **out);

void fs_reader_close(fs_reader *reader);

#endif
