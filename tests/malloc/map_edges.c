/* What of a program's mappings is managed and what is not, hints, ends and holes, what there is a limit to, and
 * that malloc does not take a mapping for its own. Where EXPECT_MANAGED is set it also looks at who has the
 * memory. */
#include "check.h"
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define PAGE ((size_t)4096)
#define MIB ((size_t)1 << 20)
#define PRIVATE (MAP_PRIVATE | MAP_ANONYMOUS)
#define ACCESS (PROT_READ | PROT_WRITE)

static bool expect_managed;

static unsigned char *map_with(void *hint, size_t bytes, int access, int flags) {
    unsigned char *at = mmap(hint, bytes, access, flags, -1, 0);
    if (at == MAP_FAILED)
        FAIL("mmap of %zu bytes with access %x and flags %x: %s", bytes, (unsigned)access,
             (unsigned)flags, strerror(errno));
    return at;
}

static unsigned char *map(size_t bytes) { return map_with(NULL, bytes, ACCESS, PRIVATE); }

static void unmap(void *at, size_t bytes) {
    CHECK(munmap(at, bytes) == 0);
    CHECK(!can_read(at));
}

static void kinds(void) {
    static const struct {
        int access, flags;
    } native[] = {
        {PROT_NONE, PRIVATE},
        {PROT_READ, PRIVATE},
        {ACCESS | PROT_EXEC, PRIVATE},
        {ACCESS, PRIVATE | MAP_STACK},
        {ACCESS, PRIVATE | MAP_GROWSDOWN},
#ifdef MAP_32BIT
        {ACCESS, PRIVATE | MAP_32BIT},
#endif
        {ACCESS, MAP_SHARED | MAP_ANONYMOUS},
    };
    for (size_t i = 0; i < sizeof native / sizeof *native; i++) {
        unsigned char *at = map_with(NULL, 4 * MIB, native[i].access, native[i].flags);
        if (is_managed(at))
            FAIL("a mapping with access %x and flags %x is managed", (unsigned)native[i].access,
                 (unsigned)native[i].flags);
        CHECK(munmap(at, 4 * MIB) == 0);
    }
    unsigned char *locked = mmap(NULL, 4 * MIB, ACCESS, PRIVATE | MAP_LOCKED, -1, 0);
    CHECK(locked == MAP_FAILED || (!is_managed(locked) && munmap(locked, 4 * MIB) == 0));
    unsigned char *huge = mmap(NULL, 4 * MIB, ACCESS, PRIVATE | MAP_HUGETLB, -1, 0);
    CHECK(huge == MAP_FAILED || (!is_managed(huge) && munmap(huge, 4 * MIB) == 0));
    int fd = memfd_create("map_edges", 0);
    CHECK(fd >= 0 && ftruncate(fd, 4 * MIB) == 0);
    unsigned char *file = mmap(NULL, 4 * MIB, ACCESS, MAP_PRIVATE, fd, 0);
    CHECK(file != MAP_FAILED && !is_managed(file) && munmap(file, 4 * MIB) == 0 && close(fd) == 0);
    unsigned char *little = map(PAGE);
    CHECK(!is_managed(little));
    unmap(little, PAGE);

    unsigned char *at = map_with(NULL, 4 * MIB, ACCESS, PRIVATE | MAP_POPULATE);
    CHECK(is_managed(at) == expect_managed);
    CHECK(absent_pages(at, 4 * MIB) == 0);
    unmap(at, 4 * MIB);
    at = map_with(NULL, 4 * MIB + 5, ACCESS, PRIVATE | MAP_NORESERVE);
    CHECK(is_managed(at) == expect_managed);
    CHECK(munmap(at, 4 * MIB + 5) == 0 && !can_read(at + 4 * MIB));
    at = (unsigned char *)syscall(SYS_mmap, NULL, 4 * MIB, ACCESS, PRIVATE, -1, 0);
    CHECK(at != MAP_FAILED && is_managed(at) == expect_managed);
    CHECK(syscall(SYS_munmap, at, 4 * MIB) == 0 && !can_read(at));
    CHECK(mmap(NULL, 0, ACCESS, PRIVATE, -1, 0) == MAP_FAILED && errno == EINVAL);
    CHECK(mmap(NULL, SIZE_MAX, ACCESS, PRIVATE, -1, 0) == MAP_FAILED && errno == ENOMEM);
    CHECK(mmap(NULL, (size_t)1 << 47, ACCESS, PRIVATE, -1, 0) == MAP_FAILED && errno == ENOMEM);
    CHECK(munmap(at + 1, PAGE) == -1 && errno == EINVAL);
    CHECK(munmap(at, 0) == -1 && errno == EINVAL);
}

static void sparse(void) {
    /* Much more than there is room for. */
    size_t bytes = (size_t)1 << 40;
    unsigned char *at = map_with(NULL, bytes, ACCESS, PRIVATE | MAP_NORESERVE);
    CHECK(!is_managed(at));
    for (size_t i = 0; i < bytes; i += bytes / 8)
        at[i] = 7;
    for (size_t i = 0; i < bytes; i += bytes / 8)
        CHECK(at[i] == 7 && at[i + 1] == 0);
    unmap(at, bytes);
}

static __thread int of_thread;

static void *looks_at_its_stack(void *stack) {
    volatile char local[512 << 10];
    local[0] = 1;
    of_thread = 2;
    CHECK(!is_managed((void *)local) && !is_managed(&of_thread));
    CHECK(!stack || ((char *)local > (char *)stack && (char *)local < (char *)stack + 8 * MIB));
    return NULL;
}

static void stacks(void) {
    pthread_t thread;
    pthread_attr_t attributes;
    for (int i = 0; i < 8; i++) {
        CHECK(pthread_create(&thread, NULL, looks_at_its_stack, NULL) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
    }
    void *stack = map_with(NULL, 8 * MIB, ACCESS, PRIVATE | MAP_STACK);
    CHECK(pthread_attr_init(&attributes) == 0);
    CHECK(pthread_attr_setstack(&attributes, stack, 8 * MIB) == 0);
    CHECK(pthread_create(&thread, &attributes, looks_at_its_stack, stack) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(munmap(stack, 8 * MIB) == 0);
}

static void hints(void) {
    unsigned char *at = map(16 * MIB);
    fill(at, 16 * MIB, 1);
    /* What was unmapped, in two parts; the second begins where the first ends. */
    unmap(at + 4 * MIB, 8 * MIB);
    CHECK(map_with(at + 4 * MIB, 4 * MIB, ACCESS, PRIVATE) == at + 4 * MIB);
    CHECK(map_with(at + 8 * MIB, 4 * MIB, ACCESS, PRIVATE) == at + 8 * MIB);
    verify_zero(at + 4 * MIB, 8 * MIB, "mapped at hints");
    verify_part(at, 0, 4 * MIB, 1, "beside what was mapped at hints");
    verify_part(at, 12 * MIB, 4 * MIB, 1, "beside what was mapped at hints");
    /* Taken. */
    unsigned char *other = map_with(at + 4 * MIB, 4 * MIB, ACCESS, PRIVATE);
    CHECK(other + 4 * MIB <= at || other >= at + 16 * MIB);
    verify_part(at, 0, 4 * MIB, 1, "beside a hint that was not followed");
    unmap(other, 4 * MIB);
    unmap(at, 16 * MIB);
    at = map_with((void *)((uintptr_t)1 << 45), 32 * MIB, ACCESS, PRIVATE);
    CHECK((uintptr_t)at % (32 * MIB) == 0);
    unmap(at, 32 * MIB);
    /* Alignment as allocators get it that do not trust hints. */
    at = map(64 * MIB - PAGE);
    unsigned char *aligned = (unsigned char *)(((uintptr_t)at + 32 * MIB - 1) & ~(32 * MIB - 1));
    size_t lead = (size_t)(aligned - at), rest = 32 * MIB - PAGE - lead;
    if (lead)
        unmap(at, lead);
    if (rest)
        unmap(aligned + 32 * MIB, rest);
    fill(aligned, 32 * MIB, 3);
    verify(aligned, 32 * MIB, 3, "an aligned part");
    unmap(aligned, 32 * MIB);
}

static void holes(void) {
    /* Three mappings side by side, unmapped from the middle of the first to the middle of the last. */
    unsigned char *at = map(12 * MIB);
    unmap(at, 12 * MIB);
    for (size_t i = 0; i < 3; i++) {
        CHECK(map_with(at + i * 4 * MIB, 4 * MIB, ACCESS, PRIVATE) == at + i * 4 * MIB);
        fill(at + i * 4 * MIB, 4 * MIB, i);
    }
    size_t from = 2 * MIB + 3 * PAGE, bytes = 7 * MIB + PAGE;
    unmap(at + from, bytes);
    CHECK(!can_read(at + from + bytes - 1) && !can_read(at + 6 * MIB));
    verify_part(at, 0, from, 0, "before the hole");
    verify_part(at + 8 * MIB, from + bytes - 8 * MIB, 12 * MIB - from - bytes, 2, "behind the hole");
    CHECK(munmap(at + from, bytes) == 0);
    CHECK(madvise(at, 12 * MIB, MADV_DONTNEED) == -1 && errno == ENOMEM);
    verify_zero(at, from, "discarded around a hole");
    verify_zero(at + from + bytes, 12 * MIB - from - bytes, "discarded around a hole");
    CHECK(mprotect(at, 12 * MIB, PROT_READ) == -1 && errno == ENOMEM);
    CHECK(mprotect(at, from, ACCESS) == 0);
    /* A file in the hole, and all of it at once. */
    int fd = memfd_create("map_edges", 0);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)MIB) == 0);
    unsigned char *file = mmap(at + from, MIB, ACCESS, MAP_SHARED | MAP_FIXED, fd, 0);
    CHECK(file == at + from);
    fill(file, MIB, 9);
    unmap(at, 12 * MIB);
    CHECK(!can_read(file) && !can_read(at + 12 * MIB - 1));
    uint64_t word;
    CHECK(pread(fd, &word, 8, 80) == 8 && word == pattern(9, 10) && close(fd) == 0);
    /* Others get the memory, but not the file. */
    unsigned char *next = map(32 * MIB);
    verify_zero(next, 32 * MIB, "after a file");
    unmap(next, 32 * MIB);
}

static void growth(void) {
    unsigned char *at = map(16 * MIB);
    fill(at, 16 * MIB, 4);
    CHECK(mremap(at, 16 * MIB, 4 * MIB, 0) == at && !can_read(at + 4 * MIB));
    CHECK(mremap(at, 4 * MIB, 12 * MIB, 0) == at);
    verify(at, 4 * MIB, 4, "grown in place");
    verify_zero(at + 4 * MIB, 8 * MIB, "grown in place");
    CHECK(mprotect(at, 12 * MIB, PROT_READ) == 0);
    unsigned char *to = mremap(at, 12 * MIB, 24 * MIB, MREMAP_MAYMOVE);
    CHECK(to != MAP_FAILED);
    CHECK(is_managed(to) == expect_managed && is_managed(to + 20 * MIB) == expect_managed);
    verify(to, 4 * MIB, 4, "grown");
    verify_zero(to + 4 * MIB, 20 * MIB, "grown");
    int ends[2];
    CHECK(pipe(ends) == 0 && write(ends[1], "", 1) == 1);
    CHECK(read(ends[0], to + 23 * MIB, 1) == -1 && errno == EFAULT);
    CHECK(mprotect(to, 24 * MIB, ACCESS) == 0);
    CHECK(read(ends[0], to + 23 * MIB, 1) == 1 && close(ends[0]) == 0 && close(ends[1]) == 0);
    unmap(to, 24 * MIB);
}

/* A child that does something with a mapping must be ended by it. */
static void expect_abort(void (*act)(unsigned char *), unsigned char *at, const char *what) {
    int status;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        fclose(stderr);
        act(at);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    if (!WIFSIGNALED(status))
        FAIL("%s of a mapping ends with status %x", what, (unsigned)status);
}

static void frees(unsigned char *at) { free(at); }
static void resizes(unsigned char *at) { at = realloc(at, 2 * MIB); }

static void no_blocks(void) {
    unsigned char *at = map(4 * MIB);
    fill(at, 4 * MIB, 1);
    for (size_t offset = 0; offset < 4 * MIB; offset += MIB + 16) {
        expect_abort(frees, at + offset, "free()");
        expect_abort(resizes, at + offset, "realloc()");
    }
    if (expect_managed)
        CHECK(malloc_usable_size(at) == 0 && malloc_usable_size(at + PAGE) == 0);
    verify(at, 4 * MIB, 1, "a mapping that was not freed");
    unmap(at, 4 * MIB);
}

static void again_and_again(void) {
    size_t rounds = setting("ROUNDS", "5000"), before = 0;
    for (size_t i = 0; i < rounds; i++) {
        size_t bytes = MIB * (1 + i % 4);
        unsigned char *at = map(bytes);
        if (at[0] || at[bytes - 1])
            FAIL("round %zu: a new mapping has old bytes", i);
        at[0] = at[bytes - 1] = 1;
        CHECK(munmap(at, bytes) == 0);
        if (i == rounds / 2)
            before = mappings();
    }
    if (mappings() > before + 8)
        FAIL("%zu rounds took %zu mappings to %zu", rounds, before, mappings());
}

/* What advice has set ends with the mapping. */
static void advised(void) {
    size_t before = mappings();
    for (size_t i = 0; i < 100; i++) {
        unsigned char *at = map(4 * MIB);
        CHECK(!has_flag(at, " dd") && is_managed(at) == expect_managed);
        CHECK(madvise(at + i * 4 * PAGE, 2 * PAGE, MADV_DONTDUMP) == 0);
        CHECK(has_flag(at + i * 4 * PAGE, " dd"));
        CHECK(madvise(at + MIB, i * PAGE, MADV_NOHUGEPAGE) == 0 || errno == EINVAL);
        unmap(at, 4 * MIB);
        unsigned char *block = need(4 * MIB);
        CHECK(madvise(block + MIB - ((uintptr_t)block & (PAGE - 1)), PAGE, MADV_DONTDUMP) == 0);
        free(block);
    }
    if (mappings() > before + 8)
        FAIL("advice took %zu mappings to %zu", before, mappings());
}

/* Holes until the kernel has had enough: a hole that is managed counts as a mapping, too. */
static void too_many_holes(void) {
    size_t before = mappings(), pages = 65536 + 8192, holes = 0;
    unsigned char *at = map(pages * PAGE);
    for (size_t i = 0; i < pages; i += 64)
        at[i * PAGE] = 3;
    size_t page = 1;
    for (; page < pages; page += 2, holes++)
        if (munmap(at + page * PAGE, PAGE) != 0)
            break;
    if (page < pages) {
        CHECK(errno == ENOMEM && holes >= 30000);
        CHECK(can_read(at + page * PAGE));
        /* Memory can still be had, and given back. */
        unsigned char *block = need(MIB);
        fill(block, MIB, 1);
        free(block);
    }
    for (size_t i = 0; i < pages; i += 64)
        CHECK(at[i * PAGE] == 3);
    unmap(at, pages * PAGE);
    if (mappings() > before + 64)
        FAIL("%zu mappings, where there were %zu", mappings(), before);
    CHECK(mappings() < 1000);
}

/* As much as there is, and what comes then. */
static void all_there_is(void) {
    enum { MAX = 512 };
    static unsigned char *had[MAX];
    const char *then = getenv("THEN");
    size_t count = 0;
    if (!then)
        return;
    for (; count < MAX; count++) {
        unsigned char *at = mmap(NULL, 64 * MIB, ACCESS, PRIVATE, -1, 0);
        if (at == MAP_FAILED) {
            CHECK(errno == ENOMEM && strcmp(then, "refused") == 0);
            break;
        }
        had[count] = at;
        if (!is_managed(at)) {
            CHECK(strcmp(then, "native") == 0);
            count++;
            break;
        }
        at[5] = 5;
    }
    CHECK(count > 2 && count < MAX);
    for (size_t i = 0; i + 1 < count; i++)
        CHECK(had[i][5] == 5);
    unmap(had[0], 64 * MIB);
    had[0] = map(64 * MIB);
    CHECK(is_managed(had[0]));
    verify_zero(had[0], 64 * MIB, "after there was nothing left");
    for (size_t i = 0; i < count; i++)
        unmap(had[i], 64 * MIB);
}

int main(void) {
    static const struct {
        const char *name;
        void (*does)(void);
    } table[] = {
        {"kinds", kinds},
        {"sparse", sparse},
        {"stacks", stacks},
        {"hints", hints},
        {"holes", holes},
        {"growth", growth},
        {"no blocks", no_blocks},
        {"again and again", again_and_again},
        {"advised", advised},
        {"too many holes", too_many_holes},
        {"all there is", all_there_is},
    };
    expect_managed = getenv("EXPECT_MANAGED");
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        uint64_t began = now_ns();
        table[i].does();
        if (getenv("TIMES"))
            fprintf(stderr, "%6" PRIu64 " ms %s\n", (now_ns() - began) / 1000000, table[i].name);
    }
    printf("ok map_edges: %zu tests\n", sizeof table / sizeof *table);
    return 0;
}
