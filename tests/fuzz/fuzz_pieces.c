/* The catalog of a folder: names and ranges of pieces, with what its index says of shapes.
 *
 * Input: a byte whose lowest bit says whether the files are ours, a byte that is the data of each
 * file in bytes, and up to two headers of files, parted by a newline. */
#include "fuzz.h"

#include <fcntl.h>

#include "base/status.h"
#include "io/pieces.h"

#define FILES_MAX 2

static const fs_shape_def SHAPES[] = {
    {.name = "a.weight", .dims_n = 2, .dims = {4, 3}},
    {.name = "b", .dims_n = 0},
    {.name = "c", .dims_n = 1, .dims = {2}},
    {.name = "empty", .dims_n = 2, .dims = {0, 5}},
};
#define SHAPES_N (sizeof SHAPES / sizeof SHAPES[0])

static char folder[256];
static int fds[FILES_MAX];

static void
remove_folder(void)
{
    for (int f = 0; f < FILES_MAX; f++) {
        char path[288];
        (void)snprintf(path, sizeof path, "%s/%d", folder, f);
        (void)unlink(path);
    }
    (void)rmdir(folder);
}

/* A folder with files 0, 1 ... that goes when the program ends: a catalog takes no links out. */
static void
make_folder(void)
{
    const char *above = getenv("TMPDIR");
    (void)snprintf(folder, sizeof folder, "%s/fs-fuzz-XXXXXX", above != NULL ? above : "/tmp");
    PROMISE(mkdtemp(folder) != NULL);
    (void)atexit(remove_folder);
    for (int f = 0; f < FILES_MAX; f++) {
        char path[288];
        (void)snprintf(path, sizeof path, "%s/%d", folder, f);
        fds[f] = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    }
}

static void
check(const fs_catalog *catalog, const size_t *nbytes, bool ours)
{
    for (size_t p = 0; p < catalog->pieces_n; p++) {
        const fs_piece *piece = &catalog->pieces[p];
        PROMISE(piece->begin <= piece->end);
        PROMISE(piece->file >= 0 && piece->file < catalog->files_n);
        PROMISE(piece->at <= nbytes[piece->file]);
        size_t numel = 1;
        for (size_t d = 0; d < piece->dims_n; d++) {
            numel *= piece->dims[d];
        }
        PROMISE(piece->end <= numel);
        if (piece->dtype >= 0) {
            size_t each = fs_dtype_nbytes((fs_dtype)piece->dtype);
            PROMISE(piece->end - piece->begin <= (nbytes[piece->file] - piece->at) / each);
        }
        if (ours) {
            bool known = false;
            for (size_t s = 0; s < SHAPES_N; s++) {
                known = known || strcmp(SHAPES[s].name, piece->name) == 0;
            }
            PROMISE(known);
        }
        size_t first, end;
        fs_catalog_find(catalog, piece->name, piece->state, &first, &end);
        PROMISE(first <= p && p < end);
        if (p > first) {
            PROMISE(catalog->pieces[p - 1].end <= piece->begin);
        }
        fs_piece part;
        PROMISE(!fs_piece_in_block(piece, 1, &part)); /* files here are shorter than a block */
        if (fs_piece_in_block(piece, 0, &part)) {
            PROMISE(part.begin >= piece->begin && part.end <= piece->end && part.begin < part.end);
        }
    }
    for (int f = 0; f < catalog->files_n; f++) {
        for (size_t room = 1; room <= 512; room *= 8) {
            char *words = malloc(room);
            PROMISE(words != NULL);
            fs_catalog_describe(catalog, f, 0, words, room);
            PROMISE(strnlen(words, room) < room);
            free(words);
        }
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes)
{
    static const char *const names[FILES_MAX] = {"0", "1"};
    if (folder[0] == '\0') {
        make_folder();
    }
    if (nbytes < 2 || nbytes > FS_FUZZ_NBYTES_MAX) {
        return 0;
    }
    bool ours = (data[0] & 1) != 0;
    size_t zeros = data[1], sizes[FILES_MAX];
    const uint8_t *at = data + 2, *end = data + nbytes;
    fs_file_def files[FILES_MAX];
    int files_n = 0;
    while (files_n < FILES_MAX) {
        const uint8_t *stop = at < end ? memchr(at, '\n', (size_t)(end - at)) : NULL;
        stop = stop == NULL || files_n + 1 == FILES_MAX ? end : stop;
        const uint64_t header_nbytes = (size_t)(stop - at);
        fuzz_file(&fds[files_n], &header_nbytes, 8, at, header_nbytes, zeros);
        sizes[files_n] = 8 + header_nbytes + zeros;
        files[files_n] = (fs_file_def){.name = names[files_n]};
        files_n++;
        if (stop == end) {
            break;
        }
        at = stop + 1;
    }
    fs_catalog *catalog;
    fs_status st = fs_catalog_open(folder, files, files_n, ours, SHAPES,
                                   ours ? SHAPES_N : 0, NULL, &catalog);
    PROMISE(st == FS_OK || st == FS_ECORRUPT || st == FS_EINVAL);
    if (st == FS_OK) {
        check(catalog, sizes, ours);
        fs_catalog_close(catalog);
    }
    return 0;
}
