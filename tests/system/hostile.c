/* A program that attaches in good order, uses more memory than there is DRAM, and then misbehaves.
 *
 *   hostile MOVE SECONDS
 *
 * What it does to its own memory is its own affair; a test looks whether anybody else notices. It ends
 * by itself after SECONDS with status 0, whatever its threads wait for, or with 1 where it could not do
 * what it was asked to. Moves are listed at the end. */

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pages.h"
#include "tiermgr.h"

#define MEMORY (192 * MIB)
/* In the table of a helper. */
#define HELPER_EVENTFD 5

/* In the ring: its entries, whose first word is epoch, sequence and state. */
#define RING_ENTRIES 64
#define RING_FIRST 4096
#define RING_ENTRY 64
#define RING_DONE 3

static int blocking_userfaultfds;
static int checks_bytes;

/* In place of libc's, also for the library: userfaultfds are made as the move wants them. */
int ioctl(int fd, unsigned long request, ...)
{
    va_list arguments;
    unsigned long argument;

    va_start(arguments, request);
    argument = va_arg(arguments, unsigned long);
    va_end(arguments);
    if (request == USERFAULTFD_IOC_NEW && blocking_userfaultfds)
        argument &= ~(unsigned long)O_NONBLOCK;
    return (int)syscall(SYS_ioctl, fd, request, argument);
}

static void fail(const char *what)
{
    perror(what);
    _exit(1);
}

static void *end_after(void *argument)
{
    sleep((unsigned)*(int *)argument);
    _exit(0);
}

static void start(void *(*what)(void *), void *argument)
{
    pthread_t thread;

    if (pthread_create(&thread, NULL, what, argument) != 0)
        fail("pthread_create");
}

/* Goes over the memory again and again, so that there is always something to move. */
static void *work(void *argument)
{
    volatile uint64_t *words = argument;

    for (uint64_t round = 0;; round++)
        for (uint64_t page = 0; page < MEMORY / PAGE; page++)
        {
            if (checks_bytes && round > 0 && words[page * PAGE_WORDS] != round - 1) {
                fprintf(stderr, "page %lu holds %lu in round %lu\n", (unsigned long)page,
                        (unsigned long)words[page * PAGE_WORDS], (unsigned long)round);
                _exit(1);
            }
            words[page * PAGE_WORDS] = round;
        }
    return NULL;
}

/* Descriptors of this process whose link holds `text`. */
static int find_fds(const char *text, int *found, int max)
{
    DIR *folder = opendir("/proc/self/fd");
    struct dirent *entry;
    int count = 0;

    if (folder == NULL)
        fail("/proc/self/fd");
    while ((entry = readdir(folder)) != NULL && count < max) {
        char path[64], link[64] = "";

        snprintf(path, sizeof path, "/proc/self/fd/%.20s", entry->d_name);
        if (readlink(path, link, sizeof link - 1) > 0 && strstr(link, text) != NULL)
            found[count++] = atoi(entry->d_name);
    }
    closedir(folder);
    return count;
}

/* The helper: the only child of this process. */
static pid_t find_helper(void)
{
    FILE *file = fopen("/proc/thread-self/children", "r");
    int pid;

    if (file == NULL || fscanf(file, "%d", &pid) != 1)
        fail("no helper among the children");
    fclose(file);
    return pid;
}

static void scribble(void *memory, size_t bytes, uint64_t *seed)
{
    for (size_t at = 0; at < bytes / 8; at++)
        ((volatile uint64_t *)memory)[at] = (*seed = mix(*seed));
}

/* Clears O_NONBLOCK and takes away whatever is there to be read. */
static void steal(const int *fds, int count)
{
    for (;;) {
        for (int n = 0; n < count; n++) {
            char message[32];
            int flags = fcntl(fds[n], F_GETFL);

            fcntl(fds[n], F_SETFL, flags | O_NONBLOCK);
            if (read(fds[n], message, sizeof message) < 0 && errno != EAGAIN)
                fail("reading what belongs to the daemon");
            fcntl(fds[n], F_SETFL, flags & ~O_NONBLOCK);
        }
    }
}

static void steal_messages(void)
{
    int fds[8], count = find_fds("[userfaultfd]", fds, 8);

    /* Limbo's has no messages, and refuses to be read by nobody. */
    steal(fds, count);
}

static void steal_signals(void)
{
    int pidfd = (int)syscall(SYS_pidfd_open, find_helper(), 0);
    int event = (int)syscall(SYS_pidfd_getfd, pidfd, HELPER_EVENTFD, 0);

    if (event < 0)
        fail("taking the eventfd of the helper");
    steal(&event, 1);
}

static void *find_ring(size_t *bytes)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[256];

    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        unsigned long first, end;

        if (strstr(line, "tiermgr-ring") == NULL ||
            sscanf(line, "%lx-%lx", &first, &end) != 2)
            continue;
        fclose(maps);
        *bytes = end - first;
        return (void *)first;
    }
    fprintf(stderr, "no ring is mapped\n");
    _exit(1);
}

static volatile uint64_t *ring_word(char *ring, uint64_t sequence)
{
    return (void *)(ring + RING_FIRST + sequence % RING_ENTRIES * RING_ENTRY);
}

static void scribble_over_the_ring(void)
{
    size_t bytes;
    void *ring = find_ring(&bytes);
    uint64_t seed = 1;

    for (;;) {
        /* Between a moment of good order and one of garbage commands come and go. */
        scribble(ring, bytes, &seed);
        usleep(1000);
    }
}

/* Damages the oldest of several commands that have been carried out since the last look, in the hope
 * that the daemon has not seen any of their answers yet. */
static void damage_the_oldest(void)
{
    size_t bytes;
    char *ring = find_ring(&bytes);
    uint64_t last = 0;

    for (;;) {
        uint64_t newest = 0, oldest;

        for (uint64_t n = 0; n < RING_ENTRIES; n++) {
            uint64_t word = *ring_word(ring, n);

            if ((word & 0xff) >= 1 && (word & 0xff) <= RING_DONE && word >> 8 > newest)
                newest = word >> 8;
        }
        for (oldest = newest; oldest > last + 1; oldest--)
            if (*ring_word(ring, oldest - 1) != ((oldest - 1) << 8 | RING_DONE))
                break;
        if (newest - oldest < 2 || *ring_word(ring, newest) != (newest << 8 | RING_DONE))
            continue;
        *ring_word(ring, oldest) = ~0ull;
        last = newest;
    }
}

static void send_nonsense(void)
{
    int fds[8], count = find_fds("socket:", fds, 8);
    uint64_t seed = 1, sent = 0;

    if (count == 0)
        fail("no socket");
    for (;;) {
        union {
            char bytes[CMSG_SPACE(sizeof(int))];
            struct cmsghdr align;
        } control = {0};
        char packet[64], answer[4096];
        struct iovec vector = {.iov_base = packet, .iov_len = 1 + (seed = mix(seed)) % sizeof packet};
        struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};

        scribble(packet, sizeof packet, &seed);
        /* Half of them begin as requests do. */
        if (seed & 1)
            packet[0] = (char)(seed >> 8) & 15;
        if (seed & 2) {
            struct cmsghdr *header;

            message.msg_control = control.bytes;
            message.msg_controllen = sizeof control.bytes;
            header = CMSG_FIRSTHDR(&message);
            header->cmsg_level = SOL_SOCKET;
            header->cmsg_type = SCM_RIGHTS;
            header->cmsg_len = CMSG_LEN(sizeof(int));
            memcpy(CMSG_DATA(header), &fds[0], sizeof(int));
        }
        if (sendmsg(fds[0], &message, MSG_NOSIGNAL) < 0)
            break;
        sent++;
        recv(fds[0], answer, sizeof answer, MSG_DONTWAIT);
    }
    if (sent == 0)
        fail("sending");
    pause();
}

static void kill_helper(int signal)
{
    if (kill(find_helper(), signal) != 0)
        fail("kill");
    pause();
}

static void close_everything(void)
{
    for (int fd = 3; fd < 4096; fd++)
        close(fd);
    pause();
}

static void take_leases(tiermgr_client *client, void *memory)
{
    unsigned long taken = 0;
    uint64_t lease;
    tiermgr_status status;

    while ((status = tiermgr_pin(client, memory, PAGE, &lease)) == TIERMGR_OK && taken < 100000)
        taken++;
    printf("%lu %s\n", taken, tiermgr_status_name(status));
}

static void take_places(void)
{
    unsigned long taken = 1;
    tiermgr_client *client;
    tiermgr_status status;

    while ((status = tiermgr_connect(NULL, &client)) == TIERMGR_OK)
        taken++;
    printf("%lu %s %s\n", taken, tiermgr_status_name(status), tiermgr_last_error());
}

int main(int argc, char **argv)
{
    const char *move = argc == 3 ? argv[1] : "";
    int seconds = argc == 3 ? atoi(argv[2]) : 0;
    tiermgr_client *client;
    void *memory;

    if (seconds <= 0) {
        fprintf(stderr, "usage: %s MOVE SECONDS\n", argv[0]);
        return 2;
    }
    start(end_after, &seconds);
    blocking_userfaultfds = strcmp(move, "attach-blocking") == 0;
    if (tiermgr_connect(NULL, &client) != TIERMGR_OK ||
        tiermgr_alloc(client, MEMORY, 0, &memory) != TIERMGR_OK) {
        fprintf(stderr, "%s\n", tiermgr_last_error());
        return 1;
    }
    if (strcmp(move, "take-leases") == 0) {
        take_leases(client, memory);
        return 0;
    }
    if (strcmp(move, "take-places") == 0) {
        take_places();
        return 0;
    }
    fill_pages(memory, MEMORY);
    checks_bytes = strcmp(move, "damage-oldest") == 0;
    start(work, memory);
    usleep(200000);
    if (strcmp(move, "attach-blocking") == 0)
        pause();
    else if (strcmp(move, "steal-messages") == 0)
        steal_messages();
    else if (strcmp(move, "steal-signals") == 0)
        steal_signals();
    else if (strcmp(move, "scribble") == 0)
        scribble_over_the_ring();
    else if (strcmp(move, "damage-oldest") == 0)
        damage_the_oldest();
    else if (strcmp(move, "nonsense") == 0)
        send_nonsense();
    else if (strcmp(move, "kill-helper") == 0)
        kill_helper(SIGKILL);
    else if (strcmp(move, "stop-helper") == 0)
        kill_helper(SIGSTOP);
    else if (strcmp(move, "close") == 0)
        close_everything();
    fprintf(stderr, "no move %s\n", move);
    return 2;
}
