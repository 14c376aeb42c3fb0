/* Processors: quotas of control groups of both versions, made up in a folder. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cpu.h"
#include "check.h"

static char root[256];

/* root/name, in memory that the next call reuses. */
static const char *
at(const char *name)
{
    static char path[1024];
    (void)snprintf(path, sizeof path, "%s/%s", root, name);
    return path;
}

static void
put(const char *name, const char *text)
{
    FILE *file = fopen(at(name), "w");
    CHECK(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0, "%s", name);
}

static unsigned
quota(const char *groups)
{
    char file[1024];
    put("groups", groups);
    (void)snprintf(file, sizeof file, "%s", at("groups"));
    return fs_cpu_quota(file, root);
}

static void
test_version2(void)
{
    CHECK(mkdir(at("a"), 0700) == 0 && mkdir(at("a/b"), 0700) == 0, "folders");
    CHECK(quota("0::/a/b\n") == 0, "no files: no quota");
    put("a/b/cpu.max", "max 100000\n");
    CHECK(quota("0::/a/b\n") == 0, "max is no quota");
    put("a/b/cpu.max", "200000 100000\n");
    CHECK(quota("0::/a/b\n") == 2, "%u", quota("0::/a/b\n"));
    put("a/b/cpu.max", "250000 100000\n");
    CHECK(quota("0::/a/b\n") == 3, "rounded up: %u", quota("0::/a/b\n"));
    put("a/b/cpu.max", "5000 100000\n");
    CHECK(quota("0::/a/b\n") == 1, "at least one: %u", quota("0::/a/b\n"));
    /* The tightest counts, wherever it stands. */
    put("a/b/cpu.max", "900000 100000\n");
    put("a/cpu.max", "400000 100000\n");
    CHECK(quota("0::/a/b\n") == 4, "%u", quota("0::/a/b\n"));
    put("cpu.max", "300000 100000\n");
    CHECK(quota("0::/a/b\n") == 3, "%u", quota("0::/a/b\n"));
    CHECK(quota("0::/\n") == 3, "%u", quota("0::/\n"));
    /* A group outside of what is mounted here: the root still counts. */
    CHECK(quota("0::/elsewhere/of/the/host\n") == 3, "%u", quota("0::/elsewhere/of/the/host\n"));
    put("cpu.max", "nonsense");
    CHECK(quota("0::/\n") == 0, "%u", quota("0::/\n"));
    put("cpu.max", "max 100000\n");
}

static void
test_version1(void)
{
    CHECK(mkdir(at("cpu"), 0700) == 0 && mkdir(at("cpu/c"), 0700) == 0, "folders");
    put("cpu/c/cpu.cfs_quota_us", "-1\n");
    put("cpu/c/cpu.cfs_period_us", "100000\n");
    const char *groups = "12:cpuset:/x\n4:cpu,cpuacct:/c\n1:name=systemd:/c\n";
    CHECK(quota(groups) == 0, "-1 is no quota");
    put("cpu/c/cpu.cfs_quota_us", "150000\n");
    CHECK(quota(groups) == 2, "%u", quota(groups));
    put("cpu/cpu.cfs_quota_us", "50000\n");
    put("cpu/cpu.cfs_period_us", "100000\n");
    CHECK(quota(groups) == 1, "%u", quota(groups));
}

int
main(void)
{
    const char *temporary = getenv("TMPDIR");
    (void)snprintf(root, sizeof root, "%s/fs-test-cpu-XXXXXX",
                   temporary != NULL ? temporary : "/tmp");
    CHECK(mkdtemp(root) != NULL, "%s", root);
#if defined(__linux__)
    test_version2();
    test_version1();
    CHECK(fs_cpu_quota("/no/such/file", root) == 0, "no list of groups: no quota");
#endif
    static const char *const files[] = {
        "groups",
        "a/b/cpu.max",
        "a/b",
        "a/cpu.max",
        "a",
        "cpu.max",
        "cpu/c/cpu.cfs_quota_us",
        "cpu/c/cpu.cfs_period_us",
        "cpu/c",
        "cpu/cpu.cfs_quota_us",
        "cpu/cpu.cfs_period_us",
        "cpu",
        "",
    };
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        CHECK(remove(at(files[i])) == 0, "%s", at(files[i]));
    }
    return 0;
}
