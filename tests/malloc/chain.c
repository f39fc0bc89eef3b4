/* Each function that gives memory, with small and large sizes: whoever serves them, what one gave another takes
 * back. */
#include "check.h"
#include <malloc.h>

static void use(void *block, size_t bytes, const char *function) {
    if (!block)
        FAIL("%s(%zu): %s", function, bytes, strerror(errno));
    fill(block, bytes, bytes);
    verify(block, bytes, bytes, function);
    if (malloc_usable_size(block) < bytes)
        FAIL("%s(%zu): only %zu bytes may be used", function, bytes, malloc_usable_size(block));
    /* Grown and shrunk by others than those that made it. */
    void *grown = realloc(block, 3 * bytes);
    CHECK(grown);
    verify(grown, bytes, bytes, function);
    void *shrunk = reallocarray(grown, bytes / 8, 4);
    CHECK(shrunk);
    verify(shrunk, bytes / 2, bytes, function);
    free(shrunk);
}

int main(void) {
    /* Its address: in a program at a fixed place that of a stub of the program's own. */
    void *(*volatile malloc_)(size_t) = malloc;
    for (size_t bytes = 64; bytes <= (size_t)64 << 20; bytes *= 8) {
        void *aligned;
        use(malloc_(bytes), bytes, "malloc");
        use(calloc(bytes / 8, 8), bytes, "calloc");
        use(realloc(NULL, bytes), bytes, "realloc");
        use(reallocarray(NULL, bytes / 8, 8), bytes, "reallocarray");
        use(memalign(64, bytes), bytes, "memalign");
        use(aligned_alloc(64, bytes), bytes, "aligned_alloc");
        CHECK(posix_memalign(&aligned, 4096, bytes) == 0);
        use(aligned, bytes, "posix_memalign");
        use(valloc(bytes), bytes, "valloc");
        /* Not all allocators have it, and the C library takes its own then. */
        if (!getenv("NO_PVALLOC"))
            use(pvalloc(bytes), bytes, "pvalloc");
        memset(aligned = malloc(bytes + 1), 'x', bytes);
        ((char *)aligned)[bytes] = 0;
        char *twin = strdup(aligned);
        CHECK(twin && strlen(twin) == bytes);
        free(twin);
        free(aligned);
    }
    char *line = NULL;
    CHECK(asprintf(&line, "%0200000d", 7) == 200000);
    free(line);
    puts("ok chain");
    return 0;
}
