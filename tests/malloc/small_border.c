/* Blocks that cross from small to large and back; whose a pointer is, whatever its age; forms with an
 * alignment; and what the allocator says of itself. Where EXPECT_MANAGED is set, also that small blocks do
 * lie in managed memory and that jemalloc's own tables do not. */
#include "check.h"
#include "of_allocator.h"
#include <sys/wait.h>

#define LARGE ((size_t)128 << 10)

extern void *small_library_block;

static void *at_exit_block;

static void at_exit(void) {
    verify(at_exit_block, 96, 5, "a block in an atexit handler");
    free(at_exit_block);
    free(need(100));
}

static void borders(void) {
    const size_t sizes[] = {16,         4096,      16384,     LARGE - 1,     LARGE,
                            LARGE + 1, 300 << 10, 1 << 20, LARGE / 2 - 1, 65536};
    size_t count = sizeof sizes / sizeof *sizes;
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; k < count; k++) {
            size_t least = sizes[i] < sizes[k] ? sizes[i] : sizes[k];
            unsigned char *block = need(sizes[i]);
            fill(block, sizes[i], i);
            block = realloc(block, sizes[k]);
            CHECK(block && malloc_usable_size(block) >= sizes[k]);
            verify(block, least, i, "after a step over the border");
            block = realloc(block, sizes[i]);
            CHECK(block && malloc_usable_size(block) >= sizes[i]);
            verify(block, least, i, "after a step back");
            free(block);
        }
    /* Up and down in small steps. */
    unsigned char *block = NULL;
    for (size_t bytes = 1000; bytes < 4 * LARGE; bytes += 1000) {
        block = realloc(block, bytes);
        CHECK(block);
        block[bytes - 1] = (unsigned char)(bytes / 1000);
    }
    for (size_t bytes = 4 * LARGE - 288; bytes > 2000; bytes -= 1000) {
        size_t last = bytes / 1000 * 1000;
        block = realloc(block, bytes);
        CHECK(block && block[last - 1] == (unsigned char)(last / 1000));
    }
    free(block);
}

static void alignments(void) {
    for (size_t align = 8; align <= 4 << 20; align *= 2)
        for (size_t bytes = 1; bytes <= 300 << 10; bytes *= 5) {
            void *block;
            CHECK(posix_memalign(&block, align, bytes) == 0 && (uintptr_t)block % align == 0);
            memset(block, 1, malloc_usable_size(block));
            free_aligned_sized(block, align, bytes);
            block = aligned_alloc(align, bytes);
            CHECK(block && (uintptr_t)block % align == 0);
            free(block);
            block = need(bytes);
            free_sized(block, bytes);
        }
    free_sized(NULL, 0);
}

static size_t read_size(const char *name) {
    size_t value, bytes = sizeof value;
    uint64_t epoch = 1;
    CHECK(mallctl("epoch", NULL, NULL, &epoch, sizeof epoch) == 0);
    if (mallctl(name, &value, &bytes, NULL, 0) != 0)
        FAIL("mallctl does not know %s", name);
    return value;
}

static void introspection(void) {
    /* Caches of threads count as allocated: so there is some slack. */
    size_t before = read_size("stats.allocated");
    struct mallinfo2 then = mallinfo2();
    void *kept[1000];
    for (size_t i = 0; i < 1000; i++) {
        kept[i] = need(10000);
        CHECK(is_managed(kept[i]) || i % 100);
    }
    CHECK(read_size("stats.allocated") >= before + 9000000);
    struct mallinfo2 now = mallinfo2();
    CHECK(now.uordblks >= then.uordblks + 9000000 && now.arena >= now.uordblks);
    void *large = need(5 << 20);
    CHECK(mallinfo2().hblkhd >= now.hblkhd + (5 << 20));
    CHECK(mallinfo().uordblks > 0);
    free(large);
    for (size_t i = 0; i < 1000; i++)
        free(kept[i]);
    CHECK(malloc_trim(0) == 1);

    size_t mib[4], length = 4, value, bytes = sizeof value;
    CHECK(mallctlnametomib("stats.mapped", mib, &length) == 0 && length == 2);
    CHECK(mallctlbymib(mib, length, &value, &bytes, NULL, 0) == 0 && value > 0);
    unsigned arena;
    bytes = sizeof arena;
    CHECK(mallctl("arenas.create", &arena, &bytes, NULL, 0) == ENOENT);
    length = 4;
    CHECK(mallctlnametomib("arena.0.extent_hooks", mib, &length) == ENOENT);
    CHECK(mallctl("no.such.name", NULL, NULL, NULL, 0) == ENOENT);

    char text[1024] = "";
    FILE *stream = fmemopen(text, sizeof text - 1, "w");
    CHECK(stream && malloc_info(0, stream) == 0 && malloc_info(1, stream) == EINVAL);
    fclose(stream);
    CHECK(strstr(text, "<malloc version=\"1\">") && strstr(text, "</malloc>"));
    CHECK(mallopt(M_MMAP_THRESHOLD, 1 << 20) == 1);
}

/* Bytes that the hooks have given out. mallinfo2 counts what libc has too. */
static size_t extent_bytes(void) {
    char text[1024] = "", buffer[1024];
    size_t bytes;
    FILE *stream = fmemopen(text, sizeof text - 1, "w");
    /* The stream's own buffer would come after the bytes were counted. */
    CHECK(stream && setvbuf(stream, buffer, _IOFBF, sizeof buffer) == 0 && malloc_info(0, stream) == 0);
    fclose(stream);
    const char *line = strstr(text, "<system type=\"extents\"");
    CHECK(line && sscanf(line, "<system type=\"extents\" size=\"%zu\"", &bytes) == 1);
    return bytes;
}

/* Blocks of many sizes make many tables. */
static void tables_lie_apart(void) {
    size_t metadata = read_size("stats.metadata"), kept = 200000;
    void **blocks = need(kept * sizeof *blocks);
    for (size_t i = 0; i < kept; i++)
        blocks[i] = need(1000 + i % 3000);
    size_t grown = read_size("stats.metadata") - metadata;
    CHECK(grown > 1 << 20);
    /* What the hooks have given out is in use, or free, as extents: none of it is a table. */
    size_t extents = extent_bytes();
    size_t pages = read_size("stats.active") / 4096;
    for (unsigned i = 0; i < 16; i++) {
        char name[64];
        snprintf(name, sizeof name, "stats.arenas.%u.pdirty", i);
        pages += read_size(name);
        snprintf(name, sizeof name, "stats.arenas.%u.retained", i);
        pages += read_size(name) / 4096;
    }
    if (extents != pages * 4096)
        FAIL("%zu bytes came from the hooks, and %zu of them are extents", extents, pages * 4096);
    for (size_t i = 0; i < kept; i++)
        free(blocks[i]);
    free(blocks);
}

int main(void) {
    verify(small_library_block, 96, 3, "a block from before the allocator");
    CHECK(malloc_usable_size(small_library_block) >= 100);
    small_library_block = realloc(small_library_block, 1000);
    verify(small_library_block, 96, 3, "a block from before the allocator, resized");
    free(small_library_block);
    at_exit_block = need(100);
    fill(at_exit_block, 96, 5);
    CHECK(atexit(at_exit) == 0);
    borders();
    alignments();
    for (int i = 0; i < 20; i++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0)
            _exit(0);
        CHECK(waitpid(pid, NULL, 0) == pid);
    }
    if (getenv("EXPECT_MANAGED")) {
        introspection();
        tables_lie_apart();
    }
    printf("ok small_border\n");
    return 0;
}
