/* The one table of FLATSHARD_* environment variables. Nothing else reads the environment in C;
 * Python reads the same table through the binding, and warns about names that are not in it. */
#ifndef FS_BASE_ENV_H
#define FS_BASE_ENV_H

#include <stddef.h>

typedef struct fs_env_entry {
    const char *name;
    const char *meaning;
} fs_env_entry;

/* The table, ended by an entry whose name is NULL. */
const fs_env_entry *fs_env_table(void);

/* The value of a variable in the table, or NULL when unset or empty. */
const char *fs_env_get(const char *name);

#endif
