/* Runs a fuzz target over files: what was found stays found, with any compiler. */
#include "fuzz.h"

int
main(int argc, char **argv)
{
    static unsigned char buffer[FS_FUZZ_NBYTES_MAX];
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        if (file == NULL) {
            perror(argv[i]);
            return 1;
        }
        size_t nbytes = fread(buffer, 1, sizeof buffer, file);
        (void)fclose(file);
        unsigned char *exact = malloc(nbytes > 0 ? nbytes : 1); /* so that a byte more is seen */
        PROMISE(exact != NULL);
        memcpy(exact, buffer, nbytes);
        (void)fprintf(stderr, "%s\n", argv[i]);
        PROMISE(LLVMFuzzerTestOneInput(exact, nbytes) == 0);
        free(exact);
    }
    return 0;
}
