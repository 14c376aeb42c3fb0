/* The one bulk collective: show bytes, meet, visit what every rank shows.
 *
 * Private memory passes through windows: every rank has a block of world memory in two halves. A
 * rank fills one half, meets, and reads the same half of everyone. It may fill the other half at
 * once, while slow ranks still read the first: nobody fills a half again before the fence that
 * follows its reading. So a piece costs one fence, and the pieces stay in the cache.
 *
 *     fill A   meet   visit A, fill B   meet   visit B, fill A   meet ...
 *
 * Operands that lie in world memory on every rank are visited where they are, all at once; then
 * a closing fence says that nobody reads them any more. Which of the two it is, ranks tell each
 * other in the first fence.
 *
 * Private to comm/. What is shown lies in world->pieces, by rank. */
#ifndef FS_COMM_SHOW_H
#define FS_COMM_SHOW_H

#include "shared.h"

/* A collective under way: what it shows, and how. It calls fs_show, or takes its steps itself. */
typedef struct fs_bulk fs_bulk;
struct fs_bulk {
    fs_world *world;
    fs_dtype dtype;
    size_t each; /* bytes of an element */
    fs_reduce_op op;
    int root;
    const unsigned char *in;
    unsigned char *out;
    size_t chunk; /* elements of a block that one round shows */
    size_t rounds;
    fs_what what;
    /* What this rank shows where it lies; shows_nothing: it shows nothing. */
    const void *operand;
    size_t operand_nbytes;
    bool shows_nothing;
    bool private_only; /* shown through windows wherever it lies */
    /* Puts elements [begin, begin + chunk) of each of this rank's blocks in its window. */
    void (*fill)(const fs_bulk *b, size_t begin, unsigned char *window);
    /* Takes elements [begin, begin + chunk) from pieces. In place: all of them, from the
     * operands. */
    void (*visit)(const fs_bulk *b, size_t begin, bool in_place);
};

/* Windows of a new world, its page of the log behind them, and its lists by rank. Collective; a
 * failure aborts the world. Close works after a failure, and twice. */
FS_NODISCARD fs_status
fs_windows_open(fs_world *world);
void fs_windows_close(fs_world *world);

/* The whole of a collective: as many rounds of fill, fence and visit as b says, in the log as one
 * operation. */
FS_NODISCARD fs_status
fs_show(const fs_bulk *b);

// ---- its steps, for a collective that does something between them -------------------------------

/* This rank's half for the next fence: world->half_nbytes. */
unsigned char *fs_window(const fs_world *world);
/* After the fence: pieces are the halves just shown; fs_window is the other half from now on. */
void fs_windows_turn(fs_world *world);
/* The first fence; windows are filled if the operand is private. *out_in_place: pieces are the
 * operands; *out_shown: pieces are windows that hold round 0. */
FS_NODISCARD fs_status
fs_show_first(const fs_bulk *b, bool *out_in_place, bool *out_shown);
/* Elements of a block of n that lie in [begin, begin + chunk). */
size_t fs_bulk_part_n(const fs_bulk *b, size_t n, size_t begin);
/* dst = src; nothing where they are one place. Large copies go past the cache, small ones stay in
 * it. */
void fs_copy_out(const fs_world *world, void *dst, const void *src, size_t nbytes);

#endif
