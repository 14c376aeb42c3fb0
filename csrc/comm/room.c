/* How much memory may still be taken. A sealed memory file has no size limit of its own, and a full
 * memory cgroup kills instead of refusing, so room is looked up before any is taken. */
#define _GNU_SOURCE
#include "shared.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATH_NBYTES 4096

/* First number in a file; UINT64_MAX where there is none ("max") or no file. */
static uint64_t
read_number(const char *path)
{
    char line[64];
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return UINT64_MAX;
    }
    bool got = fgets(line, sizeof line, file) != NULL;
    (void)fclose(file);
    char *end = line;
    uint64_t value = got ? strtoull(line, &end, 10) : 0;
    return got && end != line ? value : UINT64_MAX;
}

/* The value of "name value" in a file of such lines; 0 if it is not there. */
static uint64_t
read_field(const char *path, const char *name)
{
    char line[256];
    uint64_t value = 0;
    size_t n = strlen(name);
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return 0;
    }
    while (fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, name, n) == 0 && (line[n] == ' ' || line[n] == ':')) {
            value = strtoull(line + n + 1, NULL, 10);
            break;
        }
    }
    (void)fclose(file);
    return value;
}

/* Room of one cgroup: limit - usage, page cache that can be dropped not counted as usage. */
static uint64_t
group_room(const char *folder, const char *limit_name, const char *usage_name)
{
    char path[PATH_NBYTES + 64];
    (void)snprintf(path, sizeof path, "%s/%s", folder, limit_name);
    uint64_t limit = read_number(path);
    if (limit >= (uint64_t)1 << 60) {
        return UINT64_MAX;
    }
    (void)snprintf(path, sizeof path, "%s/%s", folder, usage_name);
    uint64_t usage = read_number(path);
    if (usage == UINT64_MAX) {
        return UINT64_MAX;
    }
    (void)snprintf(path, sizeof path, "%s/memory.stat", folder);
    uint64_t cache = read_field(path, "inactive_file");
    if (cache == 0) {
        cache = read_field(path, "total_inactive_file");
    }
    usage = usage > cache ? usage - cache : 0;
    return limit > usage ? limit - usage : 0;
}

/* The least room from the group at mount/relative up to mount. */
static uint64_t
least_room(const char *mount, char *relative, const char *limit_name, const char *usage_name)
{
    uint64_t least = UINT64_MAX;
    for (;;) {
        char folder[PATH_NBYTES];
        (void)snprintf(folder, sizeof folder, "%.2000s%.2000s", mount, relative);
        uint64_t room = group_room(folder, limit_name, usage_name);
        least = room < least ? room : least;
        char *slash = strrchr(relative, '/');
        if (slash == NULL) {
            return least;
        }
        *slash = '\0';
    }
}

static uint64_t
hash_text(const char *text)
{
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    for (; *text != '\0'; text++) {
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
    }
    return hash;
}

/* One line of /proc/self/cgroup: "4:memory:/path" (version 1) or "0::/path" (version 2). */
static void
read_group(const char *root, char *line, fs_room *out)
{
    line[strcspn(line, "\n")] = '\0';
    char *controllers = strchr(line, ':');
    char *path = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
    if (path == NULL) {
        return;
    }
    *path++ = '\0';
    controllers++;
    char mount[PATH_NBYTES];
    uint64_t room = UINT64_MAX;
    uint64_t id = hash_text(path);
    if (controllers[0] == '\0') {
        (void)snprintf(mount, sizeof mount, "%.2000s/sys/fs/cgroup", root);
        room = least_room(mount, path, "memory.max", "memory.current");
    } else if (strcmp(controllers, "memory") == 0) {
        (void)snprintf(mount, sizeof mount, "%.2000s/sys/fs/cgroup/memory", root);
        room = least_room(mount, path, "memory.limit_in_bytes", "memory.usage_in_bytes");
    }
    if (room < out->group_nbytes) {
        out->group_nbytes = room;
        out->group_id = id;
    }
}

void
fs_room_read(const char *root, fs_room *out)
{
    char path[PATH_NBYTES], line[PATH_NBYTES];
    *out = (fs_room){UINT64_MAX, 0, UINT64_MAX};
    (void)snprintf(path, sizeof path, "%.2000s/proc/self/cgroup", root);
    FILE *file = fopen(path, "re");
    if (file != NULL) {
        while (fgets(line, sizeof line, file) != NULL) {
            read_group(root, line, out);
        }
        (void)fclose(file);
    }
    (void)snprintf(path, sizeof path, "%.2000s/proc/meminfo", root);
    uint64_t kilobytes = read_field(path, "MemAvailable");
    if (kilobytes != 0) {
        out->host_nbytes = kilobytes * 1024;
    }
}
