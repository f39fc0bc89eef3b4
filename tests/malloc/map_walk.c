/* A random walk of mmap, munmap, mremap, madvise, mprotect and fork over a program's mappings, against a model
 * that knows for each page whether it is there, what may be done to it and what is in it. The mappings are kept
 * at the size of the working set. SEED chooses the walk, STEPS its length. Without the preload library the same
 * walk states what Linux does. */
#include "check.h"
#include <sys/mman.h>
#include <sys/wait.h>

#define PAGE ((size_t)4096)
#define MAX_PAGES ((size_t)1024)
#define SLOTS ((size_t)1 << 21)
#define PRIVATE (MAP_PRIVATE | MAP_ANONYMOUS)

/* A page of the program's: 0 as content is zeros. */
struct page {
    uintptr_t address;
    uint64_t content;
    int access;
};

static struct page *table;
static struct {
    uintptr_t start;
    size_t pages;
} spans[4096];
static size_t span_count, live_pages, limit_pages, managed, hints_followed;
static uint64_t chance = 1, contents = 1, step;
/* Somebody else gets what was unmapped: malloc, where it lives in the same memory. */
static bool others;

static uint64_t draw(uint64_t below) {
    chance ^= chance << 13;
    chance ^= chance >> 7;
    chance ^= chance << 17;
    return (chance >> 11) % below;
}

/* Open addressing; a page that was unmapped keeps its slot, with an access of -1. */
static struct page *slot_of(uintptr_t address) {
    size_t at = (address / PAGE * 0x9e3779b97f4a7c15u >> 20) % SLOTS;
    while (table[at].address && table[at].address != address)
        at = (at + 1) % SLOTS;
    return &table[at];
}

static struct page *find(uintptr_t address) {
    struct page *page = slot_of(address);
    return page->address && page->access != -1 ? page : NULL;
}

static void put(uintptr_t address, uint64_t content, int access) {
    struct page *page = slot_of(address);
    live_pages += !page->address || page->access == -1;
    *page = (struct page){address, content, access};
}

static void drop(uintptr_t address) {
    struct page *page = find(address);
    if (page) {
        page->access = -1;
        live_pages--;
    }
}

/* Tables of the library lie where the kernel puts them, also where something was unmapped: then what was there
 * last is not. */
static bool is_library(const struct page *page) {
    const volatile uint64_t *words = (const uint64_t *)page->address;
    if (page->access != -1 || !can_read((void *)page->address) || is_managed((void *)page->address))
        return false;
    size_t same = 0;
    while (same < PAGE / 8 && words[same] == (page->content ? pattern(page->content, same) : 0))
        same++;
    return !page->content || same < PAGE / 8;
}

static void look(uintptr_t address, const char *what) {
    const struct page *page = find(address);
    const volatile uint64_t *words = (const uint64_t *)address;
    if (!page && (others || is_library(slot_of(address))))
        return;
    if (!page || !(page->access & PROT_READ)) {
        if (can_read((void *)address))
            FAIL("step %" PRIu64 ", %s: %p can be read", step, what, (void *)address);
        return;
    }
    for (size_t i = 0; i < PAGE / 8; i++) {
        uint64_t wanted = page->content ? pattern(page->content, i) : 0;
        if (words[i] != wanted)
            FAIL("step %" PRIu64 ", %s: word %zu of %p is %016" PRIx64 ", wanted %016" PRIx64, step,
                 what, i, (void *)address, words[i], wanted);
    }
}

static void look_at(uintptr_t start, size_t pages, const char *what) {
    for (size_t i = 0; i < pages; i++)
        look(start + i * PAGE, what);
}

static void write_some(uintptr_t start, size_t pages) {
    for (size_t i = 0; i < pages; i++) {
        struct page *page = find(start + i * PAGE);
        if (!page || !(page->access & PROT_WRITE) || draw(8) == 0)
            continue;
        page->content = ++contents;
        fill((void *)page->address, PAGE, page->content);
    }
}

static void remember(uintptr_t start, size_t pages) {
    size_t at = span_count < sizeof spans / sizeof *spans ? span_count++ : draw(span_count);
    spans[at].start = start;
    spans[at].pages = pages;
}

/* A range around something that was mapped at some time; or is, where others get what was unmapped. */
static uintptr_t some_range(size_t *pages) {
    for (;;) {
        size_t span = draw(span_count);
        size_t from = draw(spans[span].pages), live = 0;
        uintptr_t start = spans[span].start + from * PAGE;
        *pages = 1 + draw(spans[span].pages - from + (draw(4) ? 0 : 300));
        if (!others)
            return start;
        while (live < *pages && find(start + live * PAGE))
            live++;
        if (live > 0) {
            *pages = live;
            return start;
        }
    }
}

/* Whether all of a range is the program's, with one access to all of it. */
static bool is_uniform(uintptr_t start, size_t pages) {
    const struct page *first = find(start);
    for (size_t i = 0; first && i < pages; i++) {
        const struct page *page = find(start + i * PAGE);
        if (!page || page->access != first->access)
            return false;
    }
    return first;
}

/* What was never mapped here may be the library's, and what was unmapped may be by now. */
static bool is_ours(uintptr_t start, size_t pages) {
    for (size_t i = 0; i < pages; i++) {
        const struct page *page = slot_of(start + i * PAGE);
        if (!page->address || (others && page->access == -1) || is_library(page))
            return false;
    }
    return true;
}

static bool is_all_gone(uintptr_t start, size_t pages) {
    for (size_t i = 0; i < pages; i++) {
        const struct page *page = slot_of(start + i * PAGE);
        if (!page->address || page->access != -1)
            return false;
    }
    return true;
}

static void is_new(uintptr_t start, size_t pages, uintptr_t except, size_t except_pages) {
    for (size_t i = 0; i < pages; i++) {
        uintptr_t at = start + i * PAGE;
        if (find(at) && (at < except || at >= except + except_pages * PAGE))
            FAIL("step %" PRIu64 ": %p was given out twice", step, (void *)at);
    }
}

static void map_some(void) {
    size_t pages = 1 + draw(MAX_PAGES);
    int flags = PRIVATE | (draw(4) ? 0 : MAP_NORESERVE) | (draw(8) ? 0 : MAP_POPULATE);
    void *hint = NULL;
    if (span_count && draw(3) == 0) {
        size_t span = draw(span_count);
        hint = (void *)(spans[span].start + (draw(2) ? spans[span].pages * PAGE : 0));
    }
    uintptr_t start = (uintptr_t)mmap(hint, pages * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
    CHECK((void *)start != MAP_FAILED);
    hints_followed += hint && (void *)start == hint;
    is_new(start, pages, 0, 0);
    for (size_t i = 0; i < pages; i++)
        put(start + i * PAGE, 0, PROT_READ | PROT_WRITE);
    remember(start, pages);
    if (draw(8) == 0)
        managed += is_managed((void *)start);
    if (draw(4) == 0)
        look_at(start, pages, "new");
    write_some(start, pages);
}

static void unmap_some(void) {
    size_t pages;
    uintptr_t start = some_range(&pages);
    if (!is_ours(start, pages))
        return;
    CHECK(munmap((void *)start, pages * PAGE) == 0);
    for (size_t i = 0; i < pages; i++)
        drop(start + i * PAGE);
    look(start, "unmapped");
    look(start + (pages - 1) * PAGE, "unmapped");
    look(start + draw(pages) * PAGE, "unmapped");
}

static void map_at_some(void) {
    size_t pages;
    uintptr_t start = some_range(&pages);
    int fixed = draw(3) ? MAP_FIXED : MAP_FIXED_NOREPLACE;
    bool gone = is_all_gone(start, pages);
    if (!is_ours(start, pages) && !(gone && fixed == MAP_FIXED_NOREPLACE))
        return;
    int access = draw(4) ? PROT_READ | PROT_WRITE : (int)draw(2) * PROT_READ;
    errno = 0;
    void *at = mmap((void *)start, pages * PAGE, access, PRIVATE | fixed, -1, 0);
    if (at == MAP_FAILED) {
        if (fixed == MAP_FIXED || errno != EEXIST)
            FAIL("step %" PRIu64 ": mmap at a place: %s", step, strerror(errno));
        /* Where all is gone the library, or libc, may have come to lie there. */
        return;
    }
    CHECK(at == (void *)start && (fixed == MAP_FIXED || gone));
    for (size_t i = 0; i < pages; i++)
        put(start + i * PAGE, 0, access);
    look_at(start, pages, "mapped at a place");
    write_some(start, pages);
}

static void move_some(void) {
    size_t pages, to_pages;
    uintptr_t start = some_range(&pages), to = 0;
    if (!is_uniform(start, pages))
        return;
    to_pages = draw(3) ? 1 + draw(2 * pages) : pages;
    int flags = draw(4) ? MREMAP_MAYMOVE : 0;
    if (flags && draw(4) == 0) {
        size_t there;
        to = some_range(&there);
        if (!is_ours(to, to_pages) || (to < start + pages * PAGE && start < to + to_pages * PAGE))
            return;
        flags |= MREMAP_FIXED;
    } else if (flags && to_pages == pages && draw(2)) {
        flags |= MREMAP_DONTUNMAP;
    }
    int access = find(start)->access;
    uintptr_t at = (uintptr_t)mremap((void *)start, pages * PAGE, to_pages * PAGE, flags, (void *)to);
    if ((void *)at == MAP_FAILED) {
        /* Two mappings side by side may be one to the kernel or not. */
        if (errno != EFAULT && !(errno == ENOMEM && !flags))
            FAIL("step %" PRIu64 ": mremap with %x: %s", step, (unsigned)flags, strerror(errno));
        look_at(start, pages, "not moved");
        /* What was at the place may be gone, or not. */
        CHECK(!to || munmap((void *)to, to_pages * PAGE) == 0);
        for (size_t i = 0; to && i < to_pages; i++)
            drop(to + i * PAGE);
        return;
    }
    CHECK(!to || at == to);
    size_t kept = pages < to_pages ? pages : to_pages;
    if (at == start) {
        is_new(start + kept * PAGE, to_pages - kept, start, pages);
        for (size_t i = kept; i < pages; i++)
            drop(start + i * PAGE);
        for (size_t i = kept; i < to_pages; i++)
            put(start + i * PAGE, 0, access);
    } else {
        if (!to)
            is_new(at, to_pages, 0, 0);
        for (size_t i = 0; i < to_pages; i++)
            put(at + i * PAGE, i < kept ? find(start + i * PAGE)->content : 0, access);
        for (size_t i = 0; i < pages; i++)
            if (flags & MREMAP_DONTUNMAP)
                put(start + i * PAGE, 0, access);
            else
                drop(start + i * PAGE);
        remember(at, to_pages);
        look_at(start, pages, "moved away");
    }
    look_at(at, to_pages, "moved");
    write_some(at, to_pages);
}

static void discard_some(void) {
    size_t pages;
    uintptr_t start = some_range(&pages);
    if (!is_ours(start, pages))
        return;
    bool has_hole = false;
    for (size_t i = 0; i < pages; i++)
        has_hole |= !find(start + i * PAGE);
    int outcome = madvise((void *)start, pages * PAGE, MADV_DONTNEED);
    if (outcome != 0 && !(has_hole && errno == ENOMEM))
        FAIL("step %" PRIu64 ": MADV_DONTNEED: %s", step, strerror(errno));
    for (size_t i = 0; i < pages; i++) {
        struct page *page = find(start + i * PAGE);
        if (page)
            page->content = 0;
    }
    look_at(start, pages, "discarded");
    write_some(start, pages);
}

static void protect_some(void) {
    size_t pages;
    uintptr_t start = some_range(&pages);
    static const int kinds[] = {PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE,
                                PROT_READ | PROT_WRITE};
    int access = kinds[draw(4)];
    for (size_t i = 0; i < pages; i++)
        if (!find(start + i * PAGE))
            return;
    CHECK(mprotect((void *)start, pages * PAGE, access) == 0);
    for (size_t i = 0; i < pages; i++)
        find(start + i * PAGE)->access = access;
    look_at(start, pages, "protected");
}

static void revisit(void) {
    size_t pages;
    uintptr_t start = some_range(&pages);
    for (size_t i = 0; i < pages; i++) {
        const struct page *page = slot_of(start + i * PAGE);
        if (page->address)
            look(page->address, "visited again");
    }
    write_some(start, pages);
}

static void look_at_all(const char *what) {
    for (size_t i = 0; i < SLOTS; i++)
        if (table[i].address && table[i].access != -1)
            look(table[i].address, what);
}

static void walk(uint64_t steps);

/* Parent and child go different ways from here. */
static void fork_some(void) {
    static bool is_child;
    if (is_child)
        return;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        is_child = true;
        chance ^= 0x5555;
        contents += 1u << 30;
        walk(100);
        look_at_all("in a child");
        _exit(0);
    }
    walk(20);
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (status != 0)
        FAIL("step %" PRIu64 ": a child ended with status %x", step, (unsigned)status);
}

static void walk(uint64_t steps) {
    for (uint64_t end = step + steps; step < end; step++) {
        if (span_count == 0 || live_pages < limit_pages / 2)
            map_some();
        while (live_pages > limit_pages)
            unmap_some();
        switch (draw(12)) {
        case 0:
        case 1: map_some(); break;
        case 2:
        case 3: unmap_some(); break;
        case 4: map_at_some(); break;
        case 5:
        case 6: move_some(); break;
        case 7: discard_some(); break;
        case 8: protect_some(); break;
        case 9:
            if (draw(100) == 0)
                fork_some();
            break;
        default: revisit();
        }
    }
}

int main(void) {
    uint64_t steps = setting("STEPS", "6000");
    chance = setting("SEED", "1") * 0x9e3779b97f4a7c15u | 1;
    limit_pages = working_set() / PAGE;
    others = getenv("TIERMGR_SMALL");
    /* Without access at first: the model is never managed. */
    size_t bytes = SLOTS * sizeof *table;
    table = mmap(NULL, bytes, PROT_NONE, PRIVATE | MAP_NORESERVE, -1, 0);
    CHECK(table != MAP_FAILED && mprotect(table, bytes, PROT_READ | PROT_WRITE) == 0);
    walk(steps);
    look_at_all("at the end");
    if (getenv("EXPECT_MANAGED") && managed == 0)
        FAIL("nothing was managed");
    printf("ok map_walk: %" PRIu64 " steps, %zu hints were followed, %zu mappings at the end\n", steps,
           hints_followed, mappings());
    return 0;
}
