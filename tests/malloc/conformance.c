/* What the manuals of glibc promise of malloc and its kin, as tables. glibc passes them itself: they hold what
 * programs expect, not what we happen to do.
 *
 * Where tiermgr differs on purpose: a block may have more room than with glibc (whole pages, or jemalloc's
 * sizes); the settings of mallopt reach libc's blocks only; malloc_info has lines of its own; with TIERMGR_SMALL
 * a large block that is freed twice is not told. None of these is in the manual.
 *
 * With PRESSURE in the environment, other memory of this program drives all blocks out between the steps. */
#include "check.h"
#include <malloc.h>

#define NO_BYTES ((size_t)0)
#define TWO_TO(n) ((size_t)1 << (n))

static const size_t sizes[] = {
    0, 1, 7, 16, 24, 4095, 4096, 65536, 131071, 131072, 131073, 1 << 20, (2 << 20) - 1, 2 << 20,
    (2 << 20) + 1, 5 << 20, 33 << 20,
};
#define COUNT(table) (sizeof table / sizeof *table)
#define SIZES COUNT(sizes)

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

/* Of C23: newer C libraries have them, and tiermgr always. */
#pragma weak free_sized
#pragma weak free_aligned_sized
void free_sized(void *, size_t);
void free_aligned_sized(void *, size_t, size_t);

static unsigned rows;

/* How each function is called with two numbers. posix_memalign gives its error where the others set errno. */
static void *call_malloc(size_t count, size_t size) { (void)count; return malloc_(size); }
static void *call_calloc(size_t count, size_t size) { return calloc_(count, size); }
static void *call_realloc(size_t count, size_t size) { (void)count; return realloc_(NULL, size); }
static void *call_reallocarray(size_t count, size_t size) { return reallocarray_(NULL, count, size); }
static void *call_aligned_alloc(size_t align, size_t size) { return aligned_alloc_(align, size); }
static void *call_memalign(size_t align, size_t size) { return memalign_(align, size); }
static void *call_valloc(size_t count, size_t size) { (void)count; return valloc_(size); }
static void *call_pvalloc(size_t count, size_t size) { (void)count; return pvalloc_(size); }
static void *call_posix_memalign(size_t align, size_t size) {
    static char untouched;
    void *block = &untouched;
    int error = posix_memalign_(&block, align, size);
    if (error == 0)
        return block;
    if (block != &untouched)
        FAIL("posix_memalign(%zu, %zu) failed and changed the pointer", align, size);
    errno = error;
    return NULL;
}

typedef void *call(size_t, size_t);

static const struct {
    const char *name;
    call *call;
    /* What its first argument is: an alignment, a number of elements, or nothing. */
    enum { ALONE, ELEMENTS, ALIGNMENT } takes;
    size_t align;
} functions[] = {
    {"malloc", call_malloc, ALONE, 16},
    {"calloc", call_calloc, ELEMENTS, 16},
    {"realloc", call_realloc, ALONE, 16},
    {"reallocarray", call_reallocarray, ELEMENTS, 16},
    {"valloc", call_valloc, ALONE, 4096},
    {"pvalloc", call_pvalloc, ALONE, 4096},
    {"memalign", call_memalign, ALIGNMENT, 16},
    {"aligned_alloc", call_aligned_alloc, ALIGNMENT, 16},
    {"posix_memalign", call_posix_memalign, ALIGNMENT, 16},
};

enum outcome { BLOCK, NO_MEMORY, INVALID, BLOCK_OR_INVALID };

/* Calls whose answer is in the manual, and whose arguments programs get wrong. `multiple` is what the
 * address of the block is a multiple of, `room` what may be used of it. */
static const struct corner {
    const char *name;
    call *call;
    size_t first, size;
    enum outcome outcome;
    size_t multiple, room;
} corners[] = {
    {"malloc(0)", call_malloc, 0, 0, BLOCK, 16, 0},
    {"malloc(1)", call_malloc, 0, 1, BLOCK, 16, 1},
    {"malloc(PTRDIFF_MAX)", call_malloc, 0, PTRDIFF_MAX, NO_MEMORY, 0, 0},
    {"malloc(PTRDIFF_MAX + 1)", call_malloc, 0, (size_t)PTRDIFF_MAX + 1, NO_MEMORY, 0, 0},
    {"malloc(2^62)", call_malloc, 0, TWO_TO(62), NO_MEMORY, 0, 0},
    {"malloc(SIZE_MAX - 16)", call_malloc, 0, SIZE_MAX - 16, NO_MEMORY, 0, 0},
    {"malloc(SIZE_MAX)", call_malloc, 0, SIZE_MAX, NO_MEMORY, 0, 0},
    {"calloc(0, 0)", call_calloc, 0, 0, BLOCK, 16, 0},
    {"calloc(0, SIZE_MAX)", call_calloc, 0, SIZE_MAX, BLOCK, 16, 0},
    {"calloc(SIZE_MAX, 0)", call_calloc, SIZE_MAX, 0, BLOCK, 16, 0},
    {"calloc(2^32, 2^32)", call_calloc, TWO_TO(32), TWO_TO(32), NO_MEMORY, 0, 0},
    {"calloc(2^32 + 1, 2^32)", call_calloc, TWO_TO(32) + 1, TWO_TO(32), NO_MEMORY, 0, 0},
    {"calloc(SIZE_MAX, 2)", call_calloc, SIZE_MAX, 2, NO_MEMORY, 0, 0},
    {"calloc(SIZE_MAX / 2, 2)", call_calloc, SIZE_MAX / 2, 2, NO_MEMORY, 0, 0},
    {"calloc(SIZE_MAX, SIZE_MAX)", call_calloc, SIZE_MAX, SIZE_MAX, NO_MEMORY, 0, 0},
    {"calloc(1, PTRDIFF_MAX)", call_calloc, 1, PTRDIFF_MAX, NO_MEMORY, 0, 0},
    {"calloc(3, 5)", call_calloc, 3, 5, BLOCK, 16, 15},
    {"calloc(1000, 1000)", call_calloc, 1000, 1000, BLOCK, 16, 1000000},
    {"realloc(NULL, 0)", call_realloc, 0, 0, BLOCK, 16, 0},
    {"realloc(NULL, SIZE_MAX)", call_realloc, 0, SIZE_MAX, NO_MEMORY, 0, 0},
    {"realloc(NULL, PTRDIFF_MAX)", call_realloc, 0, PTRDIFF_MAX, NO_MEMORY, 0, 0},
    {"reallocarray(NULL, 0, 0)", call_reallocarray, 0, 0, BLOCK, 16, 0},
    {"reallocarray(NULL, 2^32, 2^32)", call_reallocarray, TWO_TO(32), TWO_TO(32), NO_MEMORY, 0, 0},
    {"reallocarray(NULL, SIZE_MAX, 2)", call_reallocarray, SIZE_MAX, 2, NO_MEMORY, 0, 0},
    {"reallocarray(NULL, 3, 70000)", call_reallocarray, 3, 70000, BLOCK, 16, 210000},
    {"valloc(0)", call_valloc, 0, 0, BLOCK, 4096, 0},
    {"valloc(1)", call_valloc, 0, 1, BLOCK, 4096, 1},
    {"valloc(PTRDIFF_MAX)", call_valloc, 0, PTRDIFF_MAX, NO_MEMORY, 0, 0},
    {"valloc(SIZE_MAX)", call_valloc, 0, SIZE_MAX, NO_MEMORY, 0, 0},
    {"pvalloc(0)", call_pvalloc, 0, 0, BLOCK, 4096, 0},
    {"pvalloc(1)", call_pvalloc, 0, 1, BLOCK, 4096, 4096},
    {"pvalloc(4097)", call_pvalloc, 0, 4097, BLOCK, 4096, 8192},
    {"pvalloc(1000001)", call_pvalloc, 0, 1000001, BLOCK, 4096, 1003520},
    {"pvalloc(PTRDIFF_MAX)", call_pvalloc, 0, PTRDIFF_MAX, NO_MEMORY, 0, 0},
    {"pvalloc(SIZE_MAX - 4096)", call_pvalloc, 0, SIZE_MAX - 4096, NO_MEMORY, 0, 0},
    {"pvalloc(SIZE_MAX)", call_pvalloc, 0, SIZE_MAX, NO_MEMORY, 0, 0},
    /* memalign takes what is no power of two as the next one. */
    {"memalign(0, 100)", call_memalign, 0, 100, BLOCK, 16, 100},
    {"memalign(1, 100)", call_memalign, 1, 100, BLOCK, 16, 100},
    {"memalign(3, 100)", call_memalign, 3, 100, BLOCK, 16, 100},
    {"memalign(48, 100)", call_memalign, 48, 100, BLOCK, 64, 100},
    {"memalign(48, 1000000)", call_memalign, 48, 1000000, BLOCK, 64, 1000000},
    {"memalign(5000, 100)", call_memalign, 5000, 100, BLOCK, 8192, 100},
    {"memalign(5000, 1000000)", call_memalign, 5000, 1000000, BLOCK, 8192, 1000000},
    {"memalign(2^30, 100)", call_memalign, TWO_TO(30), 100, BLOCK, TWO_TO(30), 100},
    {"memalign(2^30, 1000000)", call_memalign, TWO_TO(30), 1000000, BLOCK, TWO_TO(30), 1000000},
    {"memalign(2^31, 100)", call_memalign, TWO_TO(31), 100, BLOCK, TWO_TO(31), 100},
    {"memalign(2^33, 1000000)", call_memalign, TWO_TO(33), 1000000, BLOCK, TWO_TO(33), 1000000},
    {"memalign(2^62, 100)", call_memalign, TWO_TO(62), 100, NO_MEMORY, 0, 0},
    {"memalign(2^63, 100)", call_memalign, TWO_TO(63), 100, NO_MEMORY, 0, 0},
    {"memalign(2^63 + 1, 100)", call_memalign, TWO_TO(63) + 1, 100, INVALID, 0, 0},
    {"memalign(SIZE_MAX, 1000000)", call_memalign, SIZE_MAX, 1000000, INVALID, 0, 0},
    {"memalign(4096, SIZE_MAX)", call_memalign, 4096, SIZE_MAX, NO_MEMORY, 0, 0},
    {"memalign(4096, PTRDIFF_MAX)", call_memalign, 4096, PTRDIFF_MAX, NO_MEMORY, 0, 0},
    {"memalign(8, SIZE_MAX)", call_memalign, 8, SIZE_MAX, NO_MEMORY, 0, 0},
    /* aligned_alloc did the same before glibc 2.38, and refuses it since. */
    {"aligned_alloc(0, 100)", call_aligned_alloc, 0, 100, BLOCK_OR_INVALID, 16, 100},
    {"aligned_alloc(3, 100)", call_aligned_alloc, 3, 100, BLOCK_OR_INVALID, 16, 100},
    {"aligned_alloc(48, 1000000)", call_aligned_alloc, 48, 1000000, BLOCK_OR_INVALID, 64, 1000000},
    {"aligned_alloc(1, 100)", call_aligned_alloc, 1, 100, BLOCK, 16, 100},
    {"aligned_alloc(64, 0)", call_aligned_alloc, 64, 0, BLOCK, 64, 0},
    {"aligned_alloc(64, 65)", call_aligned_alloc, 64, 65, BLOCK, 64, 65},
    {"aligned_alloc(2^31, 1000000)", call_aligned_alloc, TWO_TO(31), 1000000, BLOCK, TWO_TO(31), 1000000},
    {"aligned_alloc(2^62, 100)", call_aligned_alloc, TWO_TO(62), 100, NO_MEMORY, 0, 0},
    {"aligned_alloc(SIZE_MAX, 100)", call_aligned_alloc, SIZE_MAX, 100, INVALID, 0, 0},
    {"aligned_alloc(4096, SIZE_MAX - 4095)", call_aligned_alloc, 4096, SIZE_MAX - 4095, NO_MEMORY, 0, 0},
    {"posix_memalign(0, 100)", call_posix_memalign, 0, 100, INVALID, 0, 0},
    {"posix_memalign(1, 100)", call_posix_memalign, 1, 100, INVALID, 0, 0},
    {"posix_memalign(3, 1000000)", call_posix_memalign, 3, 1000000, INVALID, 0, 0},
    {"posix_memalign(4, 100)", call_posix_memalign, 4, 100, INVALID, 0, 0},
    {"posix_memalign(8, 100)", call_posix_memalign, 8, 100, BLOCK, 8, 100},
    {"posix_memalign(12, 100)", call_posix_memalign, 12, 100, INVALID, 0, 0},
    {"posix_memalign(24, 100)", call_posix_memalign, 24, 100, INVALID, 0, 0},
    {"posix_memalign(24, 1000000)", call_posix_memalign, 24, 1000000, INVALID, 0, 0},
    {"posix_memalign(4097, 100)", call_posix_memalign, 4097, 100, INVALID, 0, 0},
    {"posix_memalign(SIZE_MAX, 100)", call_posix_memalign, SIZE_MAX, 100, INVALID, 0, 0},
    {"posix_memalign(8, 0)", call_posix_memalign, 8, 0, BLOCK, 8, 0},
    {"posix_memalign(2^31, 100)", call_posix_memalign, TWO_TO(31), 100, BLOCK, TWO_TO(31), 100},
    {"posix_memalign(2^62, 100)", call_posix_memalign, TWO_TO(62), 100, NO_MEMORY, 0, 0},
    {"posix_memalign(64, SIZE_MAX)", call_posix_memalign, 64, SIZE_MAX, NO_MEMORY, 0, 0},
    {"posix_memalign(64, PTRDIFF_MAX)", call_posix_memalign, 64, PTRDIFF_MAX, NO_MEMORY, 0, 0},
};

static void check_corners(void) {
    for (size_t i = 0; i < COUNT(corners); i++) {
        const struct corner *row = &corners[i];
        rows++;
        errno = 0;
        void *block = row->call(row->first, row->size);
        if (!block) {
            if (!(row->outcome == NO_MEMORY && errno == ENOMEM) &&
                !((row->outcome == INVALID || row->outcome == BLOCK_OR_INVALID) && errno == EINVAL))
                FAIL("%s gave NULL with errno %d", row->name, errno);
            continue;
        }
        if (row->outcome == NO_MEMORY || row->outcome == INVALID)
            FAIL("%s gave %p, wanted NULL", row->name, block);
        if ((uintptr_t)block % row->multiple)
            FAIL("%s gave %p, wanted a multiple of %zu", row->name, block, row->multiple);
        if (malloc_usable_size(block) < row->room)
            FAIL("%s: malloc_usable_size says %zu", row->name, malloc_usable_size(block));
        memset(block, 0xa5, malloc_usable_size(block));
        free(block);
    }
}

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

static void freed(void *block, size_t size, const char *what) {
    errno = 77;
    free(block);
    if (errno != 77)
        FAIL("free of what %s gave for %zu bytes changed errno to %d", what, size, errno);
    rows++;
}

/* Each function with each size, and each alignment that it takes. */
static void check_sizes(void) {
    for (size_t f = 0; f < COUNT(functions); f++)
        for (size_t i = 0; i < SIZES; i++) {
            size_t align = functions[f].align, size = sizes[i];
            const char *name = functions[f].name;
            if (functions[f].takes == ALIGNMENT)
                for (size_t to = 8; to <= 4 << 20; to *= 2) {
                    void *block = functions[f].call(to, size);
                    aligned(block, to, name, size);
                    usable(block, size, name);
                    freed(block, size, name);
                }
            unsigned char *block = functions[f].call(functions[f].takes == ALIGNMENT ? align : 1, size);
            unsigned char *other = functions[f].call(functions[f].takes == ALIGNMENT ? align : 1, size);
            aligned(block, align, name, size);
            aligned(other, align, name, size);
            if (block == other)
                FAIL("two blocks of %zu bytes from %s are one", size, name);
            if (functions[f].call == call_calloc)
                for (size_t k = 0; k < size; k++)
                    if (block[k])
                        FAIL("calloc of %zu bytes: byte %zu is %d", size, k, block[k]);
            usable(block, size, name);
            usable(other, size, name);
            if (free_sized && functions[f].takes != ALIGNMENT && align == 16)
                free_sized(other, size);
            else if (free_aligned_sized && functions[f].call == call_aligned_alloc)
                free_aligned_sized(other, align, size);
            else
                freed(other, size, name);
            freed(block, size, name);
        }
}

/* From each size to each other. A refusal leaves the block as it was. */
static void check_resizes(void) {
    for (size_t i = 0; i < SIZES; i++)
        for (size_t k = 0; k < SIZES; k++) {
            size_t before = sizes[i], after = sizes[k];
            unsigned char *block = malloc_(before);
            CHECK(block);
            for (size_t b = 0; b < before; b++)
                block[b] = (unsigned char)(b * 31 >> 3);
            if (after == 0) {
                /* As glibc does it: frees, and gives NULL. */
                errno = 77;
                if (realloc_(block, 0) != NULL || errno != 77)
                    FAIL("realloc of %zu bytes to 0 gave a block, or errno %d", before, errno);
                CHECK((block = malloc_(before)));
                if (reallocarray_(block, 0, 8) != NULL)
                    FAIL("reallocarray of %zu bytes to 0 gave a block", before);
                continue;
            }
            block = k % 2 ? realloc_(block, after) : reallocarray_(block, 1, after);
            aligned(block, 16, "realloc", after);
            for (size_t b = 0; b < before && b < after; b++)
                if (block[b] != (unsigned char)(b * 31 >> 3))
                    FAIL("realloc from %zu to %zu bytes: byte %zu differs", before, after, b);
            usable(block, after, "realloc");
            freed(block, after, "realloc");
        }
    const size_t absurd[] = {SIZE_MAX, SIZE_MAX - 4096, PTRDIFF_MAX, (size_t)PTRDIFF_MAX + 1, TWO_TO(62)};
    for (size_t i = 0; i < SIZES; i++) {
        size_t bytes = sizes[i];
        unsigned char *block = malloc_(bytes);
        CHECK(block);
        memset(block, 0x3c, bytes);
        for (size_t k = 0; k < COUNT(absurd); k++) {
            errno = 0;
            if (realloc_(block, absurd[k]) || errno != ENOMEM)
                FAIL("realloc of %zu bytes to %zu: errno %d", bytes, absurd[k], errno);
            errno = 0;
            if (reallocarray_(block, absurd[k] / 2 + 1, 3) || errno != ENOMEM)
                FAIL("reallocarray of %zu bytes to %zu times 3: errno %d", bytes, absurd[k] / 2 + 1, errno);
            rows++;
        }
        for (size_t b = 0; b < bytes; b++)
            if (block[b] != 0x3c)
                FAIL("a refused realloc of %zu bytes changed byte %zu", bytes, b);
        free(block);
    }
}

static void check_null(void) {
    errno = 77;
    free(NULL);
    if (free_sized)
        free_sized(NULL, 0);
    if (free_aligned_sized)
        free_aligned_sized(NULL, 16, 0);
    if (malloc_usable_size(NULL) != 0 || errno != 77)
        FAIL("malloc_usable_size(NULL) is not 0, or errno changed to %d", errno);
    rows += 2;
}

/* Bytes of blocks that are in use, in whatever part of the allocator. */
static size_t told(void) {
    struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

static size_t resident(void) {
    size_t pages = 0, all = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%zu %zu", &all, &pages) == 2);
    fclose(file);
    return pages * 4096;
}

/* What the allocator says of itself, and what it can be asked to do. */
static void check_introspection(void) {
    const struct {
        size_t size, count;
    } kinds[] = {{1000, 40000}, {100000, 400}, {400000, 100}, {40000000, 1}};
    /* One kept of each kind, so that nothing is given back because it lies at an end. */
    void **blocks = malloc_(40000 * sizeof *blocks), *last[COUNT(kinds)];
    for (size_t kind = 0; kind < COUNT(kinds); kind++) {
        last[kind] = need(kinds[kind].size);
        size_t bytes = kinds[kind].size * kinds[kind].count, before = told();
        for (size_t i = 0; i < kinds[kind].count; i++)
            memset(blocks[i] = need(kinds[kind].size), 1, kinds[kind].size);
        free(last[kind]);
        last[kind] = need(kinds[kind].size);
        if (told() < before + bytes)
            FAIL("mallinfo2 tells of %zu bytes, not of %zu more than %zu", told(), bytes, before);
        struct mallinfo2 info = mallinfo2();
        if (info.arena + info.hblkhd < info.uordblks + info.hblkhd)
            FAIL("mallinfo2 tells of more in use than there is");
        size_t full = resident();
        for (size_t i = 0; i < kinds[kind].count; i++)
            free(blocks[i]);
        int trimmed = malloc_trim(0);
        if (trimmed != 0 && trimmed != 1)
            FAIL("malloc_trim gave %d", trimmed);
        /* Some stays in huge pages of others, and in caches. Under pressure it is not there before. */
        if (!getenv("PRESSURE") && resident() + bytes / 2 > full)
            FAIL("of %zu freed bytes in blocks of %zu, %zu are held after malloc_trim", bytes,
                 kinds[kind].size, bytes - (full - resident()));
        if (told() > before + bytes / 2)
            FAIL("mallinfo2 tells of %zu bytes, of freed ones too", told());
        rows += 3;
    }
    for (size_t kind = 0; kind < COUNT(kinds); kind++)
        free(last[kind]);
    free(blocks);

    char text[65536] = "";
    FILE *stream = fmemopen(text, sizeof text - 1, "w");
    CHECK(stream && malloc_info(0, stream) == 0);
    if (malloc_info(1, stream) != EINVAL)
        FAIL("malloc_info took an option");
    fclose(stream);
    CHECK(strncmp(text, "<malloc version=\"1\">", 20) == 0 && strstr(text, "</malloc>"));

    CHECK(mallopt(M_MMAP_THRESHOLD, 1 << 20) == 1 && mallopt(M_TRIM_THRESHOLD, 1 << 20) == 1);
    CHECK(mallopt(M_TOP_PAD, 1 << 16) == 1 && mallopt(M_ARENA_MAX, 4) == 1);
    CHECK(mallopt(M_PERTURB, 0) == 1 && mallopt(M_MXFAST, 64) == 1);
    if (mallopt(M_MXFAST, 1 << 20) != 0)
        FAIL("mallopt took a size for fast blocks that it cannot have");
    rows += 9;
}

/* Before anything else allocates: the first block of each kind may have to be got from far away. */
static void check_first(void) {
    if (errno != 0)
        FAIL("errno is %d when the program begins", errno);
    const size_t firsts[] = {16, 1 << 20};
    for (size_t i = 0; i < COUNT(firsts); i++) {
        errno = 7;
        void *block = malloc_(firsts[i]);
        if (!block || errno != 7)
            FAIL("the first malloc(%zu) gave %p and changed errno to %d", firsts[i], block, errno);
        freed(block, firsts[i], "malloc");
        rows++;
    }
}

int main(void) {
    static const struct {
        const char *name;
        void (*check)(void);
    } parts[] = {
        /* First, as long as free memory lies together. */
        {"introspection", check_introspection},
        {"corners", check_corners},
        {"sizes", check_sizes},
        {"resizes", check_resizes},
        {"null", check_null},
    };
    check_first();
    unsigned char *held[SIZES];
    for (size_t i = 0; i < SIZES; i++)
        fill(held[i] = need(sizes[i]), sizes[i], i);
    for (size_t i = 0; i < COUNT(parts); i++) {
        if (getenv("PRESSURE"))
            push_out();
        parts[i].check();
    }
    for (size_t i = 0; i < SIZES; i++) {
        verify(held[i], sizes[i], i, "a block that was held all the time");
        free(held[i]);
    }
    pressure_end();
    printf("ok conformance: %u rows\n", rows);
    return 0;
}
