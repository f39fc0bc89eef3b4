/* What the manual of malloc promises, as a table: each row for small and for managed sizes. */
#include "check.h"
#include <malloc.h>

static const size_t sizes[] = {
    0, 1, 7, 16, 24, 4095, 4096, 65536, 131071, 131072, 131073, 1 << 20, (2 << 20) - 1, 2 << 20,
    (2 << 20) + 1, 5 << 20, 33 << 20,
};
#define SIZES (sizeof sizes / sizeof *sizes)

/* The compiler knows malloc, and would leave out what it thinks it can foresee. */
static void *(*volatile malloc_)(size_t) = malloc;
static void *(*volatile calloc_)(size_t, size_t) = calloc;
static void *(*volatile realloc_)(void *, size_t) = realloc;
static void *(*volatile reallocarray_)(void *, size_t, size_t) = reallocarray;
static void *(*volatile aligned_alloc_)(size_t, size_t) = aligned_alloc;
static void *(*volatile memalign_)(size_t, size_t) = memalign;
static void *(*volatile valloc_)(size_t) = valloc;
static void *(*volatile pvalloc_)(size_t) = pvalloc;
static int (*volatile posix_memalign_)(void **, size_t, size_t) = posix_memalign;

static unsigned rows;

static void aligned(const void *block, size_t to, const char *what, size_t size) {
    if (!block || (uintptr_t)block % to)
        FAIL("%s of %zu bytes gave %p, wanted a multiple of %zu", what, size, block, to);
    rows++;
}

static void usable(void *block, size_t size, const char *what) {
    size_t found = malloc_usable_size(block);
    if (found < size)
        FAIL("%s of %zu bytes: malloc_usable_size says %zu", what, size, found);
    /* All that may be used can be used. */
    memset(block, 0xa5, found);
    rows++;
}

static void refused(void *block, const char *what) {
    if (block || errno != ENOMEM)
        FAIL("%s gave %p with errno %d, wanted NULL with ENOMEM", what, block, errno);
    errno = 0;
    rows++;
}

static void every_size(void) {
    for (size_t i = 0; i < SIZES; i++) {
        size_t size = sizes[i];
        void *block = malloc_(size), *other = malloc_(size);
        aligned(block, 16, "malloc", size);
        if (block == other)
            FAIL("two blocks of %zu bytes are one", size);
        usable(block, size, "malloc");
        usable(other, size, "malloc");
        errno = 77;
        free(block);
        free(other);
        if (errno != 77)
            FAIL("free changed errno to %d", errno);

        unsigned char *zeros = calloc_(1, size);
        aligned(zeros, 16, "calloc", size);
        for (size_t k = 0; k < size; k++)
            if (zeros[k])
                FAIL("calloc of %zu bytes: byte %zu is %d", size, k, zeros[k]);
        usable(zeros, size, "calloc");
        free(zeros);

        block = valloc_(size);
        aligned(block, 4096, "valloc", size);
        usable(block, size, "valloc");
        free(block);
        block = pvalloc_(size);
        aligned(block, 4096, "pvalloc", size);
        usable(block, (size + 4095) & ~(size_t)4095, "pvalloc");
        free(block);
        for (size_t align = 8; align <= 4 << 20; align *= 2) {
            CHECK(posix_memalign_(&block, align, size) == 0);
            aligned(block, align, "posix_memalign", size);
            free(block);
            block = aligned_alloc_(align, size);
            aligned(block, align, "aligned_alloc", size);
            free(block);
            block = memalign_(align, size);
            aligned(block, align, "memalign", size);
            usable(block, size, "memalign");
            free(block);
        }
    }
}

static void every_resize(void) {
    for (size_t i = 1; i < SIZES; i++)
        for (size_t k = 1; k < SIZES; k++) {
            size_t before = sizes[i], after = sizes[k];
            unsigned char *block = malloc_(before);
            CHECK(block);
            for (size_t b = 0; b < before; b++)
                block[b] = (unsigned char)(b * 31 >> 3);
            block = realloc_(block, after);
            aligned(block, 16, "realloc", after);
            for (size_t b = 0; b < before && b < after; b++)
                if (block[b] != (unsigned char)(b * 31 >> 3))
                    FAIL("realloc from %zu to %zu bytes: byte %zu differs", before, after, b);
            usable(block, after, "realloc");
            free(block);
        }
}

static void corners(void) {
    free(NULL);
    if (malloc_usable_size(NULL) != 0)
        FAIL("malloc_usable_size(NULL) is not 0");
    for (size_t i = 1; i < SIZES; i++) {
        /* As glibc does it: frees, and gives NULL. */
        if (realloc_(malloc_(sizes[i]), 0) != NULL)
            FAIL("realloc of %zu bytes to 0 gave a block", sizes[i]);
        void *block = realloc_(NULL, sizes[i]);
        aligned(block, 16, "realloc(NULL)", sizes[i]);
        free(block);
        block = reallocarray_(NULL, 2, sizes[i]);
        aligned(block, 16, "reallocarray(NULL)", sizes[i]);
        usable(block, 2 * sizes[i], "reallocarray");

        /* A refusal leaves the block as it was. */
        size_t bytes = 2 * sizes[i];
        memset(block, 0x3c, bytes);
        errno = 0;
        refused(realloc_(block, SIZE_MAX), "realloc to SIZE_MAX");
        refused(realloc_(block, PTRDIFF_MAX), "realloc to PTRDIFF_MAX");
        refused(reallocarray_(block, SIZE_MAX, 2), "reallocarray that overflows");
        for (size_t b = 0; b < bytes; b++)
            if (((unsigned char *)block)[b] != 0x3c)
                FAIL("a refused realloc changed byte %zu", b);
        free(block);
    }
    errno = 0;
    refused(malloc_(SIZE_MAX), "malloc(SIZE_MAX)");
    refused(malloc_(PTRDIFF_MAX), "malloc(PTRDIFF_MAX)");
    refused(malloc_((size_t)1 << 62), "malloc(2^62)");
    refused(calloc_(SIZE_MAX, 2), "calloc that overflows");
    refused(calloc_(SIZE_MAX / 2, 2), "calloc of nearly all");
    refused(pvalloc_(SIZE_MAX), "pvalloc(SIZE_MAX)");
    refused(valloc_(SIZE_MAX), "valloc(SIZE_MAX)");
    refused(memalign_(4096, SIZE_MAX), "memalign(SIZE_MAX)");
    refused(aligned_alloc_(4096, SIZE_MAX & ~(size_t)4095), "aligned_alloc of nearly all");

    void *untouched = &rows, *block = untouched;
    const size_t wrong[] = {0, 1, 3, 4, 12, 24, 4097};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        for (size_t size = 16; size <= 1 << 20; size <<= 16) {
            if (posix_memalign_(&block, wrong[i], size) != EINVAL || block != untouched)
                FAIL("posix_memalign took an alignment of %zu", wrong[i]);
            rows++;
        }
    errno = 5;
    if (posix_memalign_(&block, 64, SIZE_MAX) != ENOMEM || block != untouched)
        FAIL("posix_memalign of SIZE_MAX was not refused with ENOMEM");
    errno = 0;
}

int main(void) {
    every_size();
    every_resize();
    corners();
    printf("ok conformance: %u rows\n", rows);
    return 0;
}
