/* Blocks from before main (of a library that is linked, and of one that is opened later) and after
 * it, and pointers of libc's that ours must hand on. LIBRARY names the second library. */
#include "check.h"
#include <dlfcn.h>

void early_check(void);

static void *at_exit_block;

static void at_exit(void) {
    verify(at_exit_block, 1 << 20, 5, "a block in an atexit handler");
    free(at_exit_block);
}

int main(void) {
    early_check();
    at_exit_block = need(1 << 20);
    fill(at_exit_block, 1 << 20, 5);
    CHECK(atexit(at_exit) == 0);

    const char *name = getenv("LIBRARY");
    CHECK(name);
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        FAIL("dlopen: %s", dlerror());
    void (*check)(void);
    *(void **)&check = dlsym(library, "early_check");
    CHECK(check);
    check();
    CHECK(dlclose(library) == 0);

    /* Allocated inside libc, freed here. */
    char *line = NULL;
    size_t length = 0;
    FILE *file = fopen("/proc/self/maps", "r");
    CHECK(file);
    while (getline(&line, &length, file) > 0)
        ;
    fclose(file);
    free(line);
    free(strdup("small"));
    char *large = NULL;
    CHECK(asprintf(&large, "%1000000d", 7) == 1000000);
    CHECK(large[999999] == '7');
    free(large);
    printf("ok early\n");
    return 0;
}
