/* An allocator of the program's own: it gives, and never takes back. */
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define ROOM ((size_t)4 << 30)

static unsigned char *room;
static size_t used;

void *memalign(size_t align, size_t bytes) {
    if (!room) {
        room = mmap(NULL, ROOM, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (room == MAP_FAILED)
            return NULL;
    }
    align = align < 16 ? 16 : align;
    size_t at = (used + 16 + align - 1) / align * align;
    if (bytes > ROOM - at) {
        errno = ENOMEM;
        return NULL;
    }
    used = at + bytes;
    *(size_t *)(void *)(room + at - 8) = bytes;
    return room + at;
}

size_t malloc_usable_size(void *block) {
    /* Whoever mixes allocators gives a block that is none of these. */
    if ((uintptr_t)block - (uintptr_t)room >= ROOM)
        __builtin_trap();
    return ((size_t *)block)[-1];
}

void *malloc(size_t bytes) { return memalign(16, bytes); }
void *aligned_alloc(size_t align, size_t bytes) { return memalign(align, bytes); }
void *valloc(size_t bytes) { return memalign(4096, bytes); }
void *pvalloc(size_t bytes) { return memalign(4096, bytes); }
void *calloc(size_t count, size_t size) { return memalign(16, count * size); }

int posix_memalign(void **block, size_t align, size_t bytes) {
    *block = memalign(align, bytes);
    return *block ? 0 : ENOMEM;
}

void free(void *block) {
    if (block)
        malloc_usable_size(block);
}

void *realloc(void *block, size_t bytes) {
    void *made = malloc(bytes);
    if (block && made) {
        size_t had = malloc_usable_size(block);
        memcpy(made, block, had < bytes ? had : bytes);
    }
    return made;
}
