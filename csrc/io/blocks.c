#include "blocks.h"

#include <string.h>

#include "../base/checked.h"
#include "../base/crc32c.h"

size_t
fs_blocks_count(size_t nbytes)
{
    return nbytes / FS_BLOCK_NBYTES + (nbytes % FS_BLOCK_NBYTES != 0);
}

void
fs_blocks_free(fs_blocks *blocks)
{
    fs_free(blocks->crc);
    *blocks = (fs_blocks){0};
}

// ---- writing ------------------------------------------------------------------------------------

fs_status
fs_writer_open(const char *folder, const char *name, fs_ledger *ledger, fs_writer *out)
{
    fs_writer writer = {.file = FS_FILE_CLOSED};
    fs_status st;
    FS_TRY(fs_arena_open(&writer.arena, ledger, FS_WRITER_NBYTES));
    FS_TRY_GOTO(fs_arena_take(&writer.arena, FS_MEM_CHECKPOINT, FS_WRITER_NBYTES, &writer.buffer),
                st, fail);
    FS_TRY_GOTO(fs_file_create(folder, name, &writer.file), st, fail);
    *out = writer;
    return FS_OK;
fail:
    fs_arena_close(&writer.arena);
    return st;
}

/* Checksums and writes what the buffer holds. Only the last call may leave a block short. */
static fs_status
flush(fs_writer *writer)
{
    size_t blocks_n = writer->blocks.n + fs_blocks_count(writer->used);
    if (blocks_n > writer->blocks_capacity) {
        size_t capacity = fs_max_size(blocks_n, 2 * writer->blocks_capacity);
        FS_TRY(fs_grow(&writer->blocks.crc, capacity, sizeof(uint32_t)));
        writer->blocks_capacity = capacity;
    }
    for (size_t at = 0; at < writer->used; at += FS_BLOCK_NBYTES) {
        size_t n = fs_min_size(FS_BLOCK_NBYTES, writer->used - at);
        writer->blocks.crc[writer->blocks.n++] = fs_crc32c(0, writer->buffer + at, n);
    }
    FS_TRY(fs_file_write(&writer->file, writer->at, writer->used, writer->buffer));
    fs_file_start_writeback(&writer->file, writer->at, writer->used);
    writer->at += writer->used;
    writer->blocks.nbytes = writer->at;
    writer->used = 0;
    return FS_OK;
}

fs_status
fs_writer_room(fs_writer *writer, unsigned char **out, size_t *out_nbytes)
{
    if (writer->used == FS_WRITER_NBYTES) {
        FS_TRY(flush(writer));
    }
    *out = writer->buffer + writer->used;
    *out_nbytes = FS_WRITER_NBYTES - writer->used;
    return FS_OK;
}

void
fs_writer_advance(fs_writer *writer, size_t nbytes)
{
    writer->used += nbytes;
}

fs_status
fs_writer_put(fs_writer *writer, const void *bytes, size_t nbytes)
{
    const unsigned char *from = bytes;
    while (nbytes > 0) {
        unsigned char *to;
        size_t room;
        FS_TRY(fs_writer_room(writer, &to, &room));
        size_t n = fs_min_size(room, nbytes);
        memcpy(to, from, n);
        fs_writer_advance(writer, n);
        from += n;
        nbytes -= n;
    }
    return FS_OK;
}

fs_status
fs_writer_finish(fs_writer *writer, fs_blocks *out_blocks)
{
    FS_TRY(flush(writer));
    FS_TRY(fs_file_sync(&writer->file));
    FS_TRY(fs_file_close(&writer->file));
    *out_blocks = writer->blocks;
    writer->blocks = (fs_blocks){0};
    fs_writer_discard(writer);
    return FS_OK;
}

void
fs_writer_discard(fs_writer *writer)
{
    if (writer->buffer != NULL) { /* opened: file.fd is ours or -1 */
        fs_file_discard(&writer->file);
    }
    fs_blocks_free(&writer->blocks);
    fs_arena_close(&writer->arena);
    *writer = (fs_writer){.file = FS_FILE_CLOSED};
}

// ---- reading ------------------------------------------------------------------------------------

fs_status
fs_reader_open(const char *folder, const char *name, const fs_blocks *blocks, fs_ledger *ledger,
               fs_reader *out)
{
    fs_reader reader = {.file = FS_FILE_CLOSED, .blocks = blocks, .bad_block = SIZE_MAX};
    fs_status st;
    FS_TRY(fs_file_open(folder, name, &reader.file));
    if (blocks != NULL && (reader.file.nbytes != blocks->nbytes ||
                           blocks->n != fs_blocks_count(blocks->nbytes))) {
        st = FS_FAIL(FS_ECORRUPT, "%s: %zu bytes, but its index says %zu in %zu blocks",
                     reader.file.path, reader.file.nbytes, blocks->nbytes, blocks->n);
        goto fail;
    }
    /* A range of the longest kind may touch one block more at each end; a small file needs less. */
    size_t blocks_n = fs_max_size(fs_blocks_count(reader.file.nbytes), 1);
    reader.capacity =
        fs_min_size(FS_READER_NBYTES / FS_BLOCK_NBYTES + 2, blocks_n) * FS_BLOCK_NBYTES;
    FS_TRY_GOTO(fs_arena_open(&reader.arena, ledger, reader.capacity), st, fail);
    FS_TRY_GOTO(fs_arena_take(&reader.arena, FS_MEM_CHECKPOINT, reader.capacity, &reader.buffer),
                st, fail);
    *out = reader;
    return FS_OK;
fail:
    fs_arena_close(&reader.arena);
    fs_file_discard(&reader.file);
    return st;
}

/* Reads blocks [begin, end) (bytes, block rounded, end cut at the file's) behind what is kept. */
static fs_status
fill(fs_reader *reader, size_t begin, size_t end)
{
    unsigned char *to = reader->buffer + (begin - reader->begin);
    FS_TRY(fs_file_read(&reader->file, begin, end - begin, to));
    if (reader->blocks == NULL) {
        return FS_OK;
    }
    for (size_t at = begin; at < end; at += FS_BLOCK_NBYTES) {
        size_t n = fs_min_size(FS_BLOCK_NBYTES, end - at);
        size_t block = at / FS_BLOCK_NBYTES;
        if (fs_crc32c(0, to + (at - begin), n) != reader->blocks->crc[block]) {
            reader->bad_block = block;
            return FS_FAIL(FS_ECORRUPT, "%s: block %zu (bytes %zu to %zu) is damaged",
                           reader->file.path, block, at, at + n);
        }
    }
    return FS_OK;
}

fs_status
fs_reader_get(fs_reader *reader, size_t begin, size_t end, const unsigned char **out)
{
    if (begin > end || end > reader->file.nbytes || end - begin > FS_READER_NBYTES) {
        return FS_FAIL(FS_EINTERNAL, "%s: bytes %zu to %zu asked of %zu", reader->file.path, begin,
                       end, reader->file.nbytes);
    }
    size_t first = begin / FS_BLOCK_NBYTES * FS_BLOCK_NBYTES;
    size_t last = fs_min_size(fs_blocks_count(end) * FS_BLOCK_NBYTES, reader->file.nbytes);
    if (first < reader->begin || first >= reader->end) {
        reader->begin = reader->end = first;
    } else if (last > reader->end && first > reader->begin) {
        memmove(reader->buffer, reader->buffer + (first - reader->begin), reader->end - first);
        reader->begin = first;
    }
    if (last > reader->end) {
        fs_status st = fill(reader, reader->end, last);
        if (st != FS_OK) {
            reader->begin = reader->end = 0;
            return st;
        }
        reader->end = last;
    }
    *out = reader->buffer + (begin - reader->begin);
    return FS_OK;
}

void
fs_reader_close(fs_reader *reader)
{
    if (reader->buffer != NULL || reader->file.path != NULL) {
        fs_file_discard(&reader->file);
    }
    fs_arena_close(&reader->arena);
    *reader = (fs_reader){.file = FS_FILE_CLOSED};
}
