/* Where a library is looked for, and in which order. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "base/library.h"
#include "check.h"

static const char *const LOADED[] = {"libnowhere.so.9", "libc.so.6", NULL};
static const char *const NOWHERE[] = {"libnowhere.so.9", "libnowhere.so.8", NULL};
static const char *const SYSTEM[] = {"libresolv.so.2", NULL};
static const char *const PATHS[] = {"/nowhere/libnowhere.so.9", NULL};

static void *handle;
static char where[256];

static fs_status
find(const char *probe, const char *const *names, const char *const *paths)
{
    fs_library_search search = {.what = "cuBLAS",
                                .variable = "FLATSHARD_CUBLAS",
                                .probe = probe,
                                .names = names,
                                .paths = paths};
    return fs_library_find(&search, &handle, where, sizeof where);
}

/* What was found is a library: it has this function. */
static void
has(const char *symbol)
{
    void (*function)(void) = NULL;
    CHECK_OK(fs_library_symbol(handle, symbol, &function));
    CHECK(function != NULL, "%s", symbol);
}

static void
test_in_the_process(void)
{
    CHECK_OK(find("strlen", NOWHERE, NULL));
    CHECK(handle == NULL && strcmp(where, "this process") == 0, "%s", where);
    has("strlen");
    CHECK_OK(find("fs_no_such_symbol", LOADED, PATHS));
    CHECK(strstr(where, "libc.so.6, which this process had loaded") != NULL, "%s", where);
    has("strlen");
}

static void
test_through_the_system(void)
{
    /* Not loaded before; the path that is not there is passed over. */
    CHECK_OK(find("fs_no_such_symbol", SYSTEM, PATHS));
    CHECK(strcmp(where, "libresolv.so.2") == 0, "%s", where);
    has("ns_initparse");
    CHECK_OK(find("fs_no_such_symbol", NOWHERE, SYSTEM));
    CHECK(strcmp(where, "libresolv.so.2") == 0, "%s", where);
}

static void
test_missing(void)
{
    CHECK_STATUS(find("fs_no_such_symbol", NOWHERE, PATHS), FS_EUNSUPPORTED);
    const char *const told[] = {"no cuBLAS", "FLATSHARD_CUBLAS is not set",
                                "/nowhere/libnowhere.so.9: cannot open", "libnowhere.so.8: cannot"};
    for (size_t i = 0; i < sizeof told / sizeof *told; i++) {
        CHECK(strstr(fs_status_message(), told[i]) != NULL, "'%s' is not in: %s", told[i],
              fs_status_message());
    }
}

/* A file that the user named is taken, or nothing is. */
static void
test_named(void)
{
    CHECK(setenv("FLATSHARD_CUBLAS", "/nowhere/libmine.so", 1) == 0, "setenv");
    CHECK_STATUS(find("strlen", LOADED, NULL), FS_EUNSUPPORTED);
    CHECK(strstr(fs_status_message(), "FLATSHARD_CUBLAS=/nowhere/libmine.so does not load") != NULL,
          "%s", fs_status_message());
    CHECK(setenv("FLATSHARD_CUBLAS", "libresolv.so.2", 1) == 0, "setenv");
    CHECK_OK(find("strlen", LOADED, NULL));
    CHECK(strstr(where, "libresolv.so.2, of FLATSHARD_CUBLAS") != NULL, "%s", where);
    has("ns_initparse");
}

int
main(void)
{
    CHECK(unsetenv("FLATSHARD_CUBLAS") == 0, "unsetenv");
    test_in_the_process();
    test_through_the_system();
    test_missing();
    test_named();
    return 0;
}
