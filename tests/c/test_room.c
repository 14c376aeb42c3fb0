/* How much memory is left, read from a made-up system: both versions of control groups, limits
 * up the tree, cache that can be dropped, files that are missing. */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "comm/shared.h"

static char root[64];

static void
put(const char *path, const char *text)
{
    char whole[512];
    int n = snprintf(whole, sizeof whole, "%s%s", root, path);
    CHECK(n > 0 && (size_t)n < sizeof whole, "path");
    for (char *slash = whole + 1; (slash = strchr(slash, '/')) != NULL; slash++) {
        *slash = '\0';
        (void)mkdir(whole, 0700);
        *slash = '/';
    }
    FILE *file = fopen(whole, "w");
    CHECK(file != NULL, "%s", whole);
    (void)fputs(text, file);
    (void)fclose(file);
}

static void
clean(void)
{
    char command[128];
    (void)snprintf(command, sizeof command, "rm -rf %s", root);
    CHECK(system(command) == 0, "%s", command);
}

static void
test_nothing_known(void)
{
    fs_room room;
    fs_room_read(root, &room);
    CHECK(room.group_nbytes == UINT64_MAX && room.host_nbytes == UINT64_MAX, "%llu",
          (unsigned long long)room.group_nbytes);
}

static void
test_version_2(void)
{
    fs_room room, other;
    put("/proc/meminfo", "MemTotal:  10000 kB\nMemAvailable:    5000 kB\n");
    put("/proc/self/cgroup", "0::/pod/rank\n");
    put("/sys/fs/cgroup/pod/memory.max", "1000000\n");
    put("/sys/fs/cgroup/pod/memory.current", "600000\n");
    put("/sys/fs/cgroup/pod/memory.stat", "anon 1\ninactive_file 100000\n");
    put("/sys/fs/cgroup/pod/rank/memory.max", "max\n");
    put("/sys/fs/cgroup/pod/rank/memory.current", "1\n");
    fs_room_read(root, &room);
    CHECK(room.host_nbytes == 5000u * 1024, "%llu", (unsigned long long)room.host_nbytes);
    CHECK(room.group_nbytes == 500000, "the parent's limit: %llu",
          (unsigned long long)room.group_nbytes);
    put("/sys/fs/cgroup/pod/rank/memory.max", "300000\n");
    fs_room_read(root, &room);
    CHECK(room.group_nbytes == 299999, "our own limit: %llu",
          (unsigned long long)room.group_nbytes);
    put("/sys/fs/cgroup/pod/memory.current", "2000000\n");
    fs_room_read(root, &room);
    CHECK(room.group_nbytes == 0, "over the limit: %llu", (unsigned long long)room.group_nbytes);
    /* Another group has another name. */
    put("/proc/self/cgroup", "0::/pod\n");
    fs_room_read(root, &other);
    CHECK(other.group_id != room.group_id, "ids");
}

static void
test_version_1(void)
{
    fs_room room;
    put("/proc/self/cgroup", "3:cpu,cpuacct:/a\n4:memory:/docker/x\n0::/\n");
    put("/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "1000\n");
    put("/sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes", "900\n");
    put("/sys/fs/cgroup/memory/docker/x/memory.stat", "cache 9\ntotal_inactive_file 50\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "5\n");
    fs_room_read(root, &room);
    CHECK(room.group_nbytes == 150, "%llu", (unsigned long long)room.group_nbytes);
    /* In a container the path may not be there; what is mounted is our group. */
    put("/proc/self/cgroup", "4:memory:/not/visible\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "700\n");
    fs_room_read(root, &room);
    CHECK(room.group_nbytes == 695, "%llu", (unsigned long long)room.group_nbytes);
}

int
main(void)
{
    (void)snprintf(root, sizeof root, "/tmp/flatshard-room-%d", (int)getpid());
    clean();
    test_nothing_known();
    test_version_2();
    clean();
    test_version_1();
    clean();
    return 0;
}
