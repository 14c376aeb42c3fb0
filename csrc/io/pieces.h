/* Pieces: a folder is a sorted list of stretches of parameters, whoever wrote it.
 *
 * In our files a piece is one segment of one state of one parameter, a one-dimensional tensor named
 * "NAME:STATE:BEGIN" (STATE weight, moment1, moment2 or moment3; BEGIN in elements). In a Hugging
 * Face folder a piece is a whole tensor, state weight. Loading is intersection of pieces with what
 * a rank keeps, so the shape of the job that wrote a folder does not matter to the one that reads
 * it. */
#ifndef FS_IO_PIECES_H
#define FS_IO_PIECES_H

#include <stdbool.h>
#include <stddef.h>

#include "../base/arena.h"
#include "../base/dtype.h"
#include "../base/status.h"
#include "../device/device.h"
#include "../shard/shard.h"
#include "blocks.h"
#include "safetensors.h"

// ---- catalog ------------------------------------------------------------------------------------

/* A file of a folder. blocks (may be NULL: no checksums) must outlive the catalog. */
typedef struct fs_file_def {
    const char *name;
    const fs_blocks *blocks;
} fs_file_def;

/* A parameter's shape, from the index of one of our folders. */
typedef struct fs_shape_def {
    const char *name;
    size_t dims_n;
    size_t dims[FS_DIMS_MAX];
} fs_shape_def;

typedef struct fs_piece {
    const char *name;  /* of the parameter */
    fs_array state;    /* FS_WEIGHT (the master where there is one), FS_MOMENT1 ... FS_MOMENT3 */
    int dtype;         /* fs_dtype, or -1: none of ours */
    const char *dtype_name;
    size_t begin, end; /* elements of the parameter */
    size_t at;         /* bytes of the file where begin lies */
    int file;
    size_t dims_n;     /* shape of the whole parameter */
    const size_t *dims;
} fs_piece;

/* Owner: whoever opened it; pointers of pieces point into it. */
typedef struct fs_catalog {
    char *folder;
    int files_n;
    char **files; /* names */
    const fs_blocks **blocks;
    fs_safetensors *headers;
    fs_shape_def *shapes; /* sorted by name; the names are ours */
    size_t shapes_n;
    fs_piece *pieces; /* sorted by (name, state, begin); those of one state do not overlap */
    size_t pieces_n;
    bool ours;
    int first_rank; /* of ours: file f was written by rank first_rank + f */
} fs_catalog;

/* Lists a folder's pieces: the one place where names and ranges of pieces are checked. ours: the
 * files were written by fs_save, file i by rank i, and shapes lists every parameter; otherwise
 * every tensor is a piece, and shapes is not read. FS_ECORRUPT names file and tensor; FS_ESYS: a
 * file is missing. */
FS_NODISCARD fs_status
fs_catalog_open(const char *folder, const fs_file_def *files, int files_n, bool ours,
                const fs_shape_def *shapes, size_t shapes_n, fs_ledger *ledger, fs_catalog **out);
void fs_catalog_close(fs_catalog *catalog);

/* Pieces [*out_first, *out_end) of one state of a parameter; equal when there are none. */
void fs_catalog_find(const fs_catalog *catalog, const char *name, fs_array state, size_t *out_first,
                     size_t *out_end);

/* Says in words what lies in a block of a file: "layers.1.mlp.up_proj.weight rows 12-40, rank 0",
 * with "header" first where the header reaches into it. */
void fs_catalog_describe(const fs_catalog *catalog, int file, size_t block, char *buffer,
                         size_t nbytes);

/* Part of a piece that lies in a block: false when it has none, as an empty one. *out is the piece,
 * shortened. */
bool fs_piece_in_block(const fs_piece *piece, size_t block, fs_piece *out);

/* "weight", "moment1", "moment2", "moment3". */
const char *fs_state_name(fs_array state);

// ---- reading ------------------------------------------------------------------------------------

/* Reads ranges of pieces, with one file open at a time. Zeroed is closed. */
typedef struct fs_fetcher {
    const fs_catalog *catalog;
    fs_ledger *ledger;
    const fs_device *device; /* converts */
    int file;                /* of reader; valid while open */
    bool open;
    fs_reader reader;
    fs_arena arena; /* for elements that do not begin aligned; opened when first needed */
    void *aligned;
} fs_fetcher;

/* Leaves a closed one; fine on a closed one. */
void fs_fetcher_close(fs_fetcher *fetcher);

/* Elements [begin, end) of a piece, in its own dtype, aligned, valid until the next call; at most
 * fs_fetcher_max elements. Damage is FS_ECORRUPT and named as fs_catalog_describe does. */
FS_NODISCARD fs_status
fs_fetch(fs_fetcher *fetcher, const fs_piece *piece, size_t begin, size_t end, const void **out);
size_t fs_fetcher_max(const fs_piece *piece);

/* Elements [begin, end) of a parameter's state, from as many pieces as hold them, converted to
 * dtype. */
FS_NODISCARD fs_status
fs_fetch_range(fs_fetcher *fetcher, const char *name, fs_array state, size_t begin, size_t end,
               void *dst, fs_dtype dtype);

/* What fs_read leaves as it is of a parameter. */
enum { FS_SKIP_NOTHING, FS_SKIP_ALL, FS_SKIP_MOMENTS };

/* What fs_read moves. */
typedef struct fs_read_def {
    const char *const *names;   /* layout->params_n: each parameter's name in the folder */
    const unsigned char *skip;  /* params_n: FS_SKIP_* of each; or NULL */
    int moments_n;              /* 0: weights only */
} fs_read_def;

/* Collective: everything that this rank keeps, from the catalog into shards, whatever the shape of
 * both. local: how opening the catalog went on this rank (catalog is NULL unless FS_OK). Fails on
 * all ranks if it fails on one, with that rank's reason. What is missing or damaged is found before
 * anything is written: files with checksums are read twice, the second time from the cache.
 * Only a file that fails while it is read again leaves weights that are part old, part new. */
FS_NODISCARD fs_status
fs_read(const fs_catalog *catalog, fs_status local, fs_shards *shards, const fs_read_def *def);

// ---- writing ------------------------------------------------------------------------------------

/* Gives elements [begin, end) of tensor index in dtype at dst. */
typedef fs_status (*fs_source)(void *ctx, size_t index, size_t begin, size_t end, void *dst,
                               fs_dtype dtype);

/* Creates folder/name with these tensors (wider dtypes first), streamed from source, synced. */
FS_NODISCARD fs_status
fs_stream(const char *folder, const char *name, const fs_tensor_def *defs, size_t defs_n,
          const fs_text_pair *metadata, size_t metadata_n, fs_source source, void *ctx,
          fs_ledger *ledger, fs_blocks *out_blocks);

/* Collective: each rank writes the segments it speaks for (weights, and the first moments_n
 * moments) to folder/rank-RRRRR-of-WWWWW.safetensors. FS_ESTATE when a step did not finish. Room
 * for all of them is checked first. *out_blocks (world size entries, allocated here; fs_blocks_free
 * each, fs_free) describes every rank's file. Fails on all ranks if it fails on one; half files
 * stay, for the caller to remove with the folder. */
FS_NODISCARD fs_status
fs_save(fs_shards *shards, const char *folder, int moments_n, fs_blocks **out_blocks);

/* What a rank would save, copied, so that the training may go on while it is written. */
typedef struct fs_snapshot fs_snapshot;

/* Collective, as the first half of fs_save: room in folder is checked, and everything that this
 * rank speaks for is copied into memory charged as FS_MEM_CHECKPOINT to the world's ledger (which
 * must outlive the snapshot). */
FS_NODISCARD fs_status
fs_snapshot_open(fs_shards *shards, const char *folder, int moments_n, fs_snapshot **out);

/* What fs_snapshot_open and fs_snapshot_write charge to a rank's ledger, added to plan. */
FS_NODISCARD fs_status
fs_snapshot_plan(const fs_layout *layout, const fs_policy *policy, int moments_n, int rank,
                 fs_ledger *plan);

/* Local, from any one thread: this rank's file, as fs_save writes it. Once. */
FS_NODISCARD fs_status
fs_snapshot_write(fs_snapshot *snapshot, const char *folder, fs_blocks *out_blocks);

/* NULL is fine. */
void fs_snapshot_close(fs_snapshot *snapshot);

/* The name of a rank's file; buffer of 64 bytes. */
void fs_rank_file_name(int rank, int size, char *buffer);

#endif
