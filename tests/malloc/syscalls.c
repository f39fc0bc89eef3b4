/* System calls whose buffers are parked: the kernel's own accesses wait like the program's. FOLDER in
 * the environment must lie on a local file system for O_DIRECT. */
#include "check.h"
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define BYTES ((size_t)1 << 20)

static unsigned char *source, *target;
static char path[4096];
static size_t absent;

/* The first `bytes` of `buffer` are about to be the kernel's: all of them must be away. */
static void park(const void *buffer, size_t bytes, const char *what) {
    size_t pages = (bytes + 4095) / 4096, away = 0;
    for (int tries = 0; tries < 10 && away < pages; tries++) {
        push_out();
        away = absent_pages(buffer, bytes);
    }
    if (getenv("EXPECT_PARKED") && away < pages)
        FAIL("%s: only %zu of %zu pages were away when the kernel wanted them", what, away, pages);
    absent += away;
}

/* The source is parked, and the target has other bytes than are about to come. */
static void prepare(uint64_t seed, const char *what) {
    fill(target, BYTES, seed + 1000);
    fill(source, BYTES, seed);
    park(source, BYTES, what);
}

static void all(ssize_t done, const char *what) {
    if (done != (ssize_t)BYTES)
        FAIL("%s: %zd of %zu bytes (%s)", what, done, BYTES, strerror(errno));
}

static void files(int flags, const char *what, uint64_t seed) {
    prepare(seed, what);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | flags, 0600);
    if (fd < 0 && errno == EINVAL && flags & O_DIRECT) {
        SKIPPED("%s: FOLDER's file system has no O_DIRECT", what);
        return;
    }
    CHECK(fd >= 0);
    all(write(fd, source, BYTES), what);
    park(target, BYTES, what);
    CHECK(lseek(fd, 0, SEEK_SET) == 0);
    all(read(fd, target, BYTES), what);
    verify(target, BYTES, seed, what);
    close(fd);
}

static void vectors(void) {
    prepare(3, "writev");
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0);
    struct iovec out[4], in[2];
    for (size_t i = 0; i < 4; i++)
        out[i] = (struct iovec){source + i * BYTES / 4, BYTES / 4};
    for (size_t i = 0; i < 2; i++)
        in[i] = (struct iovec){target + i * BYTES / 2, BYTES / 2};
    all(writev(fd, out, 4), "writev");
    park(target, BYTES, "readv");
    CHECK(lseek(fd, 0, SEEK_SET) == 0);
    all(readv(fd, in, 2), "readv");
    verify(target, BYTES, 3, "readv");
    close(fd);
}

static void sockets(void) {
    prepare(4, "sendmsg");
    park(target, BYTES, "recvmsg");
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    size_t sent = 0, received = 0;
    while (received < BYTES) {
        struct iovec out = {source + sent, BYTES - sent < 65536 ? BYTES - sent : 65536};
        struct msghdr message = {.msg_iov = &out, .msg_iovlen = 1};
        if (sent < BYTES) {
            ssize_t done = sendmsg(ends[0], &message, MSG_DONTWAIT);
            CHECK(done > 0 || errno == EAGAIN);
            sent += done > 0 ? (size_t)done : 0;
        }
        struct iovec in = {target + received, BYTES - received};
        message = (struct msghdr){.msg_iov = &in, .msg_iovlen = 1};
        ssize_t done = recvmsg(ends[1], &message, MSG_DONTWAIT);
        CHECK(done > 0 || errno == EAGAIN);
        received += done > 0 ? (size_t)done : 0;
    }
    verify(target, BYTES, 4, "sendmsg and recvmsg");
    close(ends[0]);
    close(ends[1]);
}

/* The smallest io_uring: one request at a time, made with bare system calls. */
struct ring {
    int fd;
    struct io_uring_params params;
    unsigned char *sq, *cq;
    struct io_uring_sqe *entries;
};

static bool ring_open(struct ring *ring) {
    memset(ring, 0, sizeof *ring);
    ring->fd = (int)syscall(SYS_io_uring_setup, 4, &ring->params);
    if (ring->fd < 0)
        return false;
    struct io_uring_params *p = &ring->params;
    size_t sq = p->sq_off.array + p->sq_entries * sizeof(unsigned);
    size_t cq = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
    int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
    ring->sq = mmap(NULL, sq, protection, flags, ring->fd, IORING_OFF_SQ_RING);
    ring->cq = mmap(NULL, cq, protection, flags, ring->fd, IORING_OFF_CQ_RING);
    ring->entries = mmap(NULL, p->sq_entries * sizeof *ring->entries, protection, flags, ring->fd,
                         IORING_OFF_SQES);
    CHECK(ring->sq != MAP_FAILED && ring->cq != MAP_FAILED && ring->entries != MAP_FAILED);
    return true;
}

static int ring_do(struct ring *ring, int operation, int fd, void *buffer, size_t bytes) {
    struct io_uring_params *p = &ring->params;
    unsigned *tail = (unsigned *)(ring->sq + p->sq_off.tail);
    unsigned mask = *(unsigned *)(ring->sq + p->sq_off.ring_mask);
    unsigned slot = *tail & mask;
    struct io_uring_sqe *entry = &ring->entries[slot];
    memset(entry, 0, sizeof *entry);
    entry->opcode = (uint8_t)operation;
    entry->fd = fd;
    entry->addr = (uint64_t)(uintptr_t)buffer;
    entry->len = (uint32_t)bytes;
    ((unsigned *)(ring->sq + p->sq_off.array))[slot] = slot;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    CHECK(syscall(SYS_io_uring_enter, ring->fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1);
    unsigned *head = (unsigned *)(ring->cq + p->cq_off.head);
    unsigned *end = (unsigned *)(ring->cq + p->cq_off.tail);
    CHECK(*head != __atomic_load_n(end, __ATOMIC_ACQUIRE));
    unsigned cq_mask = *(unsigned *)(ring->cq + p->cq_off.ring_mask);
    struct io_uring_cqe *completion =
        (struct io_uring_cqe *)(ring->cq + p->cq_off.cqes) + (*head & cq_mask);
    int result = completion->res;
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return result;
}

static void uring(int flags, const char *what, uint64_t seed) {
    struct ring ring;
    if (!ring_open(&ring)) {
        SKIPPED("%s: no io_uring here: %s", what, strerror(errno));
        return;
    }
    prepare(seed, what);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | flags, 0600);
    if (fd >= 0) {
        all(ring_do(&ring, IORING_OP_WRITE, fd, source, BYTES), what);
        park(target, BYTES, what);
        all(ring_do(&ring, IORING_OP_READ, fd, target, BYTES), what);
        verify(target, BYTES, seed, what);
        close(fd);
    } else {
        CHECK(errno == EINVAL && flags & O_DIRECT);
    }
    close(ring.fd);
}

static void names(const char *folder) {
    char here[4096];
    CHECK(chdir(folder) == 0 && getcwd(here, sizeof here));
    memset(target, 'x', BYTES);
    park(target, 4096, "getcwd");
    CHECK(getcwd((char *)target, BYTES));
    if (strcmp(here, (char *)target) != 0)
        FAIL("getcwd gave '%s', wanted '%s'", (char *)target, here);

    /* The arguments of a program lie in parked memory when it is started. */
    strcpy((char *)source, "/bin/echo");
    strcpy((char *)source + 4096, "from parked memory");
    char **arguments = (char **)(source + 8192);
    arguments[0] = (char *)source;
    arguments[1] = (char *)source + 4096;
    arguments[2] = NULL;
    park(source, 3 * 4096, "execve");
    int output[2];
    CHECK(pipe(output) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        dup2(output[1], 1);
        execv(arguments[0], arguments);
        _exit(126);
    }
    close(output[1]);
    char said[64] = {0};
    ssize_t length = read(output[0], said, sizeof said - 1);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0 && length > 0);
    if (strcmp(said, "from parked memory\n") != 0)
        FAIL("the program got '%s'", said);
    close(output[0]);
}

int main(void) {
    const char *folder = getenv("FOLDER") ? getenv("FOLDER") : ".";
    snprintf(path, sizeof path, "%s/syscalls.%d", folder, (int)getpid());
    CHECK(posix_memalign((void **)&source, 4096, BYTES) == 0);
    CHECK(posix_memalign((void **)&target, 4096, BYTES) == 0);
    files(0, "write and read", 1);
    files(O_DIRECT, "write and read with O_DIRECT", 2);
    vectors();
    sockets();
    uring(0, "io_uring", 5);
    uring(O_DIRECT, "io_uring with O_DIRECT", 6);
    CHECK(unlink(path) == 0);
    names(folder);
    free(source);
    free(target);
    pressure_end();
    printf("ok syscalls: %zu pages were away when the kernel wanted them\n", absent);
    return 0;
}
