/* Processors this process may use: affinity mask and control-group quota. */
#define _GNU_SOURCE
#include "cpu.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#if defined(__linux__)
#include <sched.h>

/* Reads the start of a small file as text; false if it cannot be read. */
static int
read_text(const char *path, char *text, size_t capacity)
{
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return 0;
    }
    size_t n = fread(text, 1, capacity - 1, file);
    text[n] = '\0';
    (void)fclose(file);
    return n > 0;
}

/* Processors that quota of period microseconds allows, rounded up; 0: no limit. */
static unsigned
quota_cpus(long long quota, long long period)
{
    if (quota <= 0 || period <= 0) {
        return 0;
    }
    long long cpus = (quota + period - 1) / period;
    return cpus > 65536 ? 0 : (unsigned)cpus;
}

/* The limit of one group: cpu.max (version 2) or cfs_quota_us and cfs_period_us (version 1). */
static unsigned
group_limit(const char *folder)
{
    char path[2100], text[128];
    long long quota, period;
    (void)snprintf(path, sizeof path, "%s/cpu.max", folder);
    if (read_text(path, text, sizeof text)) {
        /* "max 100000" does not start with a number: no limit. */
        return sscanf(text, "%lld %lld", &quota, &period) == 2 ? quota_cpus(quota, period) : 0;
    }
    (void)snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", folder);
    if (!read_text(path, text, sizeof text) || sscanf(text, "%lld", &quota) != 1) {
        return 0;
    }
    (void)snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
    if (!read_text(path, text, sizeof text) || sscanf(text, "%lld", &period) != 1) {
        return 0;
    }
    return quota_cpus(quota, period);
}

static unsigned
smaller_limit(unsigned a, unsigned b)
{
    return a == 0 ? b : (b == 0 || a < b ? a : b);
}

/* The tightest limit from group up to the root of the hierarchy mounted at mount. */
static unsigned
limit_up_the_tree(const char *mount, const char *group)
{
    char folder[2000];
    unsigned limit = 0;
    size_t root = strlen(mount);
    (void)snprintf(folder, sizeof folder, "%s%s", mount, group);
    for (;;) {
        limit = smaller_limit(limit, group_limit(folder));
        char *slash = strrchr(folder, '/');
        if (strlen(folder) <= root || slash == NULL || slash < folder + root) {
            return limit;
        }
        *slash = '\0';
    }
}

/* Lines of groups: "0::/path" (version 2), "4:cpu,cpuacct:/path" (version 1). */
unsigned
fs_cpu_quota(const char *groups, const char *mount)
{
    char text[4096], version1[1000], *rest = NULL;
    unsigned limit = 0;
    if (!read_text(groups, text, sizeof text) || strlen(mount) > 900) {
        return 0;
    }
    (void)snprintf(version1, sizeof version1, "%s/cpu", mount);
    for (char *line = strtok_r(text, "\n", &rest); line != NULL;
         line = strtok_r(NULL, "\n", &rest)) {
        char *controllers = strchr(line, ':');
        char *group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (group == NULL || strlen(group) > 900) {
            continue;
        }
        *group++ = '\0';
        controllers++;
        if (controllers[0] == '\0') {
            limit = smaller_limit(limit, limit_up_the_tree(mount, group));
        } else if (strstr(controllers, "cpu") != NULL && strstr(controllers, "cpuset") == NULL) {
            limit = smaller_limit(limit, limit_up_the_tree(version1, group));
        }
    }
    return limit;
}

static unsigned
affinity_cpus(void)
{
    /* Machines with more processors than a cpu_set_t holds need a larger mask. */
    union {
        cpu_set_t set;
        unsigned long words[1024];
    } mask;
    memset(&mask, 0, sizeof mask);
    if (sched_getaffinity(0, sizeof mask, &mask.set) != 0) {
        return 0;
    }
    return (unsigned)CPU_COUNT_S(sizeof mask, &mask.set);
}

unsigned
fs_cpu_count(void)
{
    unsigned quota = fs_cpu_quota("/proc/self/cgroup", "/sys/fs/cgroup");
    unsigned cpus = smaller_limit(affinity_cpus(), quota);
    return cpus == 0 ? 1 : cpus;
}

#else

unsigned
fs_cpu_quota(const char *groups, const char *mount)
{
    (void)groups;
    (void)mount;
    return 0;
}

unsigned
fs_cpu_count(void)
{
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    return cpus < 1 ? 1 : (unsigned)cpus;
}

#endif
