/* Mappings that are none of ours at addresses of managed memory. The kernel lets MOVE take pages from
 * anywhere: they must stay, and so must everything beside them.
 *   file      a part of a block that is still native becomes a mapping of a file, which cannot be armed
 *   uffd      the program registers a part of a block with a userfaultfd of its own
 *   dontfork  a child has mappings of its own where its parent had a block */
#include "check.h"
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define PART ((size_t)64 << 10)

/* System calls that no library sees. */
static long bare(long number, long a, long b, long c, long d, long e, long f) {
    long result;
#if defined(__x86_64__)
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
#else
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
                     : "memory");
    result = x0;
#endif
    return result;
}

static void *part_of(size_t bytes) {
    void *block = aligned_alloc(PART, bytes);
    CHECK(block);
    return block;
}

static void file(void) {
    unsigned char *block = part_of((size_t)16 << 20);
    fill(block, (size_t)16 << 20, 3);
    int fd = open("/proc/self/exe", O_RDONLY);
    CHECK(fd >= 0);
    unsigned char expected[8192];
    CHECK(pread(fd, expected, sizeof expected, 0) == sizeof expected);
    long at = bare(SYS_mmap, (long)block, sizeof expected, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0);
    CHECK(at == (long)block);
    push_out();
    CHECK(memcmp(block, expected, sizeof expected) == 0);
    verify_part(block, sizeof expected, ((size_t)16 << 20) - sizeof expected, 3, "beside the file");
}

static void uffd(void) {
    unsigned char *block = part_of((size_t)16 << 20);
    fill(block, (size_t)16 << 20, 4);
    long own = bare(SYS_userfaultfd, O_CLOEXEC, 0, 0, 0, 0, 0);
    if (own < 0) {
        SKIPPED("no userfaultfd of its own: %s", strerror((int)-own));
        return;
    }
    struct uffdio_api api = {.api = UFFD_API};
    CHECK(ioctl((int)own, UFFDIO_API, &api) == 0);
    struct uffdio_register range = {.range = {(uintptr_t)block, PART},
                                    .mode = UFFDIO_REGISTER_MODE_MISSING};
    CHECK(ioctl((int)own, UFFDIO_REGISTER, &range) == 0);
    push_out();
    verify(block, (size_t)16 << 20, 4, "a block with a userfaultfd of the program's");
}

static void child(unsigned char *hole, size_t bytes) {
    bool is_mapped[64] = {false};
    size_t count = bytes >> 20, mapped = 0;
    CHECK(count <= 64);
    for (size_t i = 0; i < count; i++) {
        unsigned char *at = hole + (i << 20);
        long made = bare(SYS_mmap, (long)at, 1 << 20, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        /* The kernel may have put something small of the library there; limbo is larger than the hole. */
        if (made == -EEXIST)
            continue;
        CHECK(made == (long)at);
        is_mapped[i] = true;
        mapped++;
        fill(at, 1 << 20, i);
    }
    if (mapped < count - count / 4)
        FAIL("only %zu of %zu MiB were free", mapped, count);
    for (int round = 0; round < 3; round++)
        push_out();
    for (size_t i = 0; i < count; i++)
        if (is_mapped[i])
            verify(hole + (i << 20), 1 << 20, i, "a mapping of the child's own");
    _exit(0);
}

static void dontfork(void) {
    size_t bytes = (size_t)32 << 20;
    unsigned char *block = part_of(bytes);
    fill(block, bytes, 5);
    CHECK(bare(SYS_madvise, (long)block, (long)bytes, MADV_DONTFORK, 0, 0, 0) == 0);
    pid_t forked = fork();
    CHECK(forked >= 0);
    if (forked == 0)
        child(block, bytes);
    int status;
    CHECK(waitpid(forked, &status, 0) == forked);
    if (status != 0)
        FAIL("the child ended with status %#x", status);
    verify(block, bytes, 5, "the parent's block");
}

int main(void) {
    const char *what = getenv("WHAT");
    if (!what)
        FAIL("WHAT is file, uffd or dontfork");
    (strcmp(what, "file") == 0 ? file : strcmp(what, "uffd") == 0 ? uffd : dontfork)();
    pressure_end();
    printf("ok foreign: %s\n", what);
    return 0;
}
