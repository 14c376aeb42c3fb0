/* World memory: stretches of the job's data file that every rank maps. */
#define _GNU_SOURCE
#include "shared.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#ifndef FS_THREADS_ONLY
#include <fcntl.h>
#endif

#include "../base/checked.h"

size_t
fs_page_nbytes(void)
{
    static _Atomic size_t known;
    size_t nbytes = atomic_load_explicit(&known, memory_order_relaxed);
    if (nbytes == 0) {
        nbytes = (size_t)sysconf(_SC_PAGESIZE);
        atomic_store_explicit(&known, nbytes, memory_order_relaxed);
    }
    return nbytes;
}

// ---- spans --------------------------------------------------------------------------------------

fs_status
fs_span_reserve(fs_job *job, size_t nbytes, uint64_t *out_at)
{
    nbytes = fs_round_up(nbytes, fs_page_nbytes());
    if (job->threads) {
        fs_arena arena;
        FS_TRY(fs_arena_open(&arena, NULL, nbytes));
        *out_at = (uint64_t)(uintptr_t)arena.base; /* given back by fs_span_free */
        return FS_OK;
    }
    *out_at = atomic_fetch_add(&job->page->end, nbytes);
    return FS_OK;
}

fs_status
fs_span_map(fs_job *job, uint64_t at, size_t nbytes, void *out)
{
    void *mapped = (void *)(uintptr_t)at;
#ifndef FS_THREADS_ONLY
    if (!job->threads) {
        nbytes = fs_round_up(nbytes, fs_page_nbytes());
        mapped = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, job->data_fd, (off_t)at);
        if (mapped == MAP_FAILED) {
            return FS_FAIL_ERRNO("could not map %zu bytes of world memory", nbytes);
        }
    }
#endif
#ifdef MADV_DONTDUMP
    /* A core file of one rank should not hold every rank's weights. */
    (void)madvise(mapped, fs_round_up(nbytes, fs_page_nbytes()), MADV_DONTDUMP);
#endif
    memcpy(out, &mapped, sizeof mapped);
    (void)job;
    return FS_OK;
}

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

fs_status
fs_span_populate(fs_job *job, uint64_t at, void *mapped, size_t nbytes)
{
    nbytes = fs_round_up(nbytes, fs_page_nbytes());
    if (nbytes == 0) {
        return FS_OK;
    }
#ifndef FS_THREADS_ONLY
    if (!job->threads) {
        int rc;
        do {
            rc = fallocate(job->data_fd, 0, (off_t)at, (off_t)nbytes);
        } while (rc < 0 && errno == EINTR);
        if (rc < 0) {
            if (errno == ENOSPC || errno == ENOMEM) {
                return FS_FAIL(FS_ENOMEM,
                               "the system has no room for %zu bytes of world memory: %s", nbytes,
                               strerror(errno));
            }
            return FS_FAIL_ERRNO("could not take %zu bytes of world memory%s", nbytes,
                                 errno == EFBIG ? " (RLIMIT_FSIZE; 'ulimit -f unlimited' lifts it)"
                                                : "");
        }
    }
#else
    (void)job;
    (void)at;
#endif
#ifdef __linux__
    if (madvise(mapped, nbytes, MADV_POPULATE_WRITE) == 0) {
        return FS_OK;
    }
    if (errno == ENOMEM) {
        return FS_FAIL(FS_ENOMEM, "the system has no room for %zu bytes of world memory", nbytes);
    }
#endif
    /* Older systems: touch each page. Fresh memory is zero, and stays so. */
    for (size_t i = 0; i < nbytes; i += fs_page_nbytes()) {
        ((volatile unsigned char *)mapped)[i] = 0;
    }
    return FS_OK;
}

void
fs_span_unmap(fs_job *job, void *mapped, size_t nbytes)
{
    if (!job->threads) {
        (void)munmap(mapped, fs_round_up(nbytes, fs_page_nbytes()));
    }
}

void
fs_span_free(fs_job *job, uint64_t at, size_t nbytes)
{
    nbytes = fs_round_up(nbytes, fs_page_nbytes());
    if (job->threads) {
        fs_arena arena = {
            .base = (unsigned char *)(uintptr_t)at, .capacity = nbytes, .mapped = true};
        fs_arena_close(&arena);
        return;
    }
#ifndef FS_THREADS_ONLY
    (void)fallocate(job->data_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)at,
                    (off_t)nbytes);
#endif
}

void
fs_span_abandon(fs_job *job, uint64_t at, size_t nbytes)
{
    if (!job->threads) {
        fs_span_free(job, at, nbytes);
        return;
    }
    (void)pthread_mutex_lock(&job->lock);
    /* Without memory for the list the span stays until the process ends. */
    if (fs_grow(&job->orphans, job->orphans_n + 1, sizeof *job->orphans) == FS_OK) {
        job->orphans[job->orphans_n++] = (fs_orphan){at, nbytes};
    }
    (void)pthread_mutex_unlock(&job->lock);
}

// ---- room ---------------------------------------------------------------------------------------

/* What ranks tell each other before and after they take memory. */
enum { ROOM_GROUP, ROOM_GROUP_ID, ROOM_HOST, ROOM_FILE, ROOM_AT, ROOM_STATUS };

static void
read_room(const fs_job *job, fs_payload *out)
{
    fs_room room;
    fs_room_read("", &room);
    out->u[ROOM_GROUP] = room.group_nbytes;
    out->u[ROOM_GROUP_ID] = room.group_id;
    out->u[ROOM_HOST] = room.host_nbytes;
    out->u[ROOM_FILE] = UINT64_MAX;
    struct rlimit limit;
    if (!job->threads && getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        out->u[ROOM_FILE] = (uint64_t)limit.rlim_cur;
    }
}

#define MIB(nbytes) ((double)(nbytes) / 1048576.0)

/* Would stride bytes of every rank fit? A pure function of what all ranks said: all say the
 * same. */
static fs_status
check_room(const fs_world *world, const char *name, size_t stride, uint64_t end,
           const fs_payload *all)
{
    uint64_t total = (uint64_t)stride * (uint64_t)world->size;
    for (int r = 0; r < world->size; r++) {
        uint64_t together = 0;
        for (int other = 0; other < world->size; other++) {
            together += all[other].u[ROOM_GROUP_ID] == all[r].u[ROOM_GROUP_ID] ? stride : 0;
        }
        if (together > all[r].u[ROOM_GROUP]) {
            return FS_FAIL(
                FS_EBUDGET,
                "world memory '%s' needs %.1f MiB (%d ranks x %.1f MiB), but "
                "the memory cgroup of rank %d has %.1f MiB left; raise its limit, or use "
                "fewer ranks or a smaller model",
                name, MIB(total), world->size, MIB(stride), world->ranks[r],
                MIB(all[r].u[ROOM_GROUP]));
        }
        if (total > all[r].u[ROOM_HOST]) {
            return FS_FAIL(FS_EBUDGET,
                           "world memory '%s' needs %.1f MiB (%d ranks x %.1f MiB), but "
                           "this host has %.1f MiB available",
                           name, MIB(total), world->size, MIB(stride), MIB(all[r].u[ROOM_HOST]));
        }
        if (end > all[r].u[ROOM_FILE]) {
            return FS_FAIL(FS_EBUDGET,
                           "world memory '%s' of %.1f MiB would pass the file size limit "
                           "of rank %d, %.1f MiB (RLIMIT_FSIZE; 'ulimit -f unlimited' lifts it)",
                           name, MIB(total), world->ranks[r], MIB(all[r].u[ROOM_FILE]));
        }
    }
    return FS_OK;
}

// ---- regions ------------------------------------------------------------------------------------

static uint64_t
hash_name(const char *text)
{
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    for (; *text != '\0'; text++) {
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
    }
    return hash;
}

static fs_region_page *
region_page(const fs_region *region)
{
    return (fs_region_page *)region->base;
}

/* The status of all ranks together: ours if we failed, else the first other failure. */
static fs_status
everyone(const fs_world *world, const char *name, fs_status mine, const fs_payload *all)
{
    if (mine != FS_OK) {
        return mine;
    }
    for (int r = 0; r < world->size; r++) {
        if (all[r].u[ROOM_STATUS] != FS_OK) {
            return FS_FAIL(FS_ENOMEM, "world memory '%s': rank %d could not take its part", name,
                           world->ranks[r]);
        }
    }
    return FS_OK;
}

static void
region_free(fs_region *region)
{
    fs_free(region->name);
    fs_free(region);
}

static fs_status
region_new(fs_world *world, const char *name, size_t stride, size_t nbytes, fs_region **out)
{
    fs_region *region;
    FS_TRY(fs_calloc(1, sizeof *region, &region));
    fs_status st = fs_strdup(name, &region->name);
    if (st != FS_OK) {
        fs_free(region);
        return st;
    }
    region->job = world->job;
    region->size = world->size;
    region->stride = stride;
    region->nbytes = nbytes;
    atomic_store(&region->refs, 1);
    *out = region;
    return FS_OK;
}

/* Maps the region and makes this rank's block (the first rank: the region page too) real. */
static fs_status
region_take(fs_world *world, fs_region *region)
{
    void *base;
    size_t page = fs_page_nbytes();
    FS_TRY(fs_span_map(world->job, region->at, region->nbytes, &base));
    region->base = base;
    fs_status st = FS_OK;
    if (world->rank == 0) {
        st = fs_span_populate(world->job, region->at, base, page);
        if (st == FS_OK) {
            atomic_store(&region_page(region)->open, (uint32_t)world->size);
        }
    }
    if (st == FS_OK) {
        size_t offset = page + (size_t)world->rank * region->stride;
        st = fs_span_populate(world->job, region->at + offset, region->base + offset,
                              region->stride);
    }
    return st;
}

fs_status
fs_region_open(fs_world *world, const char *name, size_t stride_nbytes, fs_region **out)
{
    FS_TRY(fs_world_usable(world));
    fs_job *job = world->job;
    size_t page = fs_page_nbytes(), stride, blocks, nbytes;
    FS_TRY(fs_add_size(stride_nbytes, page - 1, &stride));
    stride &= ~(page - 1);
    FS_TRY(fs_mul_size(stride, (size_t)world->size, &blocks));
    FS_TRY(fs_add_size(blocks, page, &nbytes));

    fs_payload mine = {{0}}, *all = NULL;
    fs_region *region = NULL;
    uint64_t at = 0;
    fs_status prepared = fs_calloc((size_t)world->size, sizeof *all, &all);
    if (prepared != FS_OK) {
        /* Not even the lists: nothing to meet with, so the others are told through the job. */
        fs_world_abort(world, FS_CAUSE_ERROR, world->ranks[world->rank], 0);
        return prepared;
    }
    prepared = region_new(world, name, stride, nbytes, &region);
    read_room(job, &mine);
    if (world->rank == 0 && prepared == FS_OK) {
        prepared = fs_span_reserve(job, nbytes, &at);
    }
    mine.u[ROOM_AT] = at;
    mine.u[ROOM_STATUS] = (uint64_t)prepared;
    fs_what what = {FS_OP_REGION, -1, -1, stride, hash_name(name)};
    fs_status st = fs_meet(world, &what, &mine, all, 0);
    if (st == FS_OK) {
        /* First: the better answer where address space could not be had either. */
        st = check_room(world, name, stride, job->threads ? 0 : all[0].u[ROOM_AT] + nbytes, all);
    }
    if (st == FS_OK) {
        st = everyone(world, name, prepared, all);
    }
    if (st != FS_OK) {
        if (world->rank == 0 && at != 0) {
            /* Nobody took it: the offset may be handed out again, if nothing came after it. It may
             * be another world's from then on. */
            uint64_t end = at + nbytes;
            if (job->threads) {
                fs_span_free(job, at, nbytes);
            } else {
                (void)atomic_compare_exchange_strong(&job->page->end, &end, at);
            }
            at = 0;
        }
        goto fail;
    }

    region->at = all[0].u[ROOM_AT];
    fs_status taken = region_take(world, region);
    memset(&mine, 0, sizeof mine);
    mine.u[ROOM_STATUS] = (uint64_t)taken;
    what.root = 1; /* the second half */
    st = fs_meet(world, &what, &mine, all, 0);
    if (st == FS_OK) {
        st = everyone(world, name, taken, all);
    }
    if (st != FS_OK) {
        goto fail;
    }
    fs_free(all);
    atomic_fetch_add(&job->refs, 1);
    (void)pthread_mutex_lock(&job->lock);
    region->next = job->regions;
    job->regions = region;
    (void)pthread_mutex_unlock(&job->lock);
    *out = region;
    return FS_OK;

fail:
    if (region != NULL && region->base != NULL) {
        fs_span_unmap(job, region->base, nbytes);
    }
    if (world->rank == 0 && at != 0) {
        fs_span_abandon(job, at, nbytes);
    }
    if (region != NULL) {
        region_free(region);
    }
    fs_free(all);
    return st;
}

unsigned char *
fs_region_block(const fs_region *region, int rank)
{
    return region->base + fs_page_nbytes() + (size_t)rank * region->stride;
}

size_t
fs_region_stride(const fs_region *region)
{
    return region->stride;
}

void
fs_region_retain(fs_region *region)
{
    atomic_fetch_add(&region->refs, 1);
}

void
fs_region_close(fs_region *region)
{
    if (region == NULL || fs_job_is_forked(region->job) ||
        atomic_fetch_sub(&region->refs, 1) != 1) {
        return;
    }
    fs_job *job = region->job;
    (void)pthread_mutex_lock(&job->lock);
    for (fs_region **link = &job->regions; *link != NULL; link = &(*link)->next) {
        if (*link == region) {
            *link = region->next;
            break;
        }
    }
    (void)pthread_mutex_unlock(&job->lock);
    bool last = atomic_fetch_sub(&region_page(region)->open, 1) == 1;
    fs_span_unmap(job, region->base, region->nbytes);
    if (last) {
        fs_span_free(job, region->at, region->nbytes);
    }
    region_free(region);
    fs_job_close(job);
}

// ---- addresses ----------------------------------------------------------------------------------

uint64_t
fs_region_address(fs_job *job, const void *memory, size_t nbytes)
{
    const unsigned char *p = memory;
    uint64_t address = 0;
    (void)pthread_mutex_lock(&job->lock);
    for (const fs_region *region = job->regions; region != NULL; region = region->next) {
        if (p >= region->base && nbytes <= region->nbytes &&
            (size_t)(p - region->base) <= region->nbytes - nbytes) {
            address = region->at + (uint64_t)(p - region->base);
            break;
        }
    }
    (void)pthread_mutex_unlock(&job->lock);
    return address;
}

const void *
fs_region_find(fs_job *job, uint64_t address, size_t nbytes)
{
    const void *found = NULL;
    (void)pthread_mutex_lock(&job->lock);
    for (const fs_region *region = job->regions; region != NULL; region = region->next) {
        if (address >= region->at && nbytes <= region->nbytes &&
            address - region->at <= region->nbytes - nbytes) {
            found = region->base + (address - region->at);
            break;
        }
    }
    (void)pthread_mutex_unlock(&job->lock);
    return found;
}
