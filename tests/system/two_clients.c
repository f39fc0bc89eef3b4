/* Two clients of the daemon in one process, each with memory of its own, and every byte is checked.
 *
 *   two_clients leave MIB ROUNDS   both fill MIB; the first disconnects while the second works on
 *   two_clients stay MIB ROUNDS    both fill MIB, then work at the same time
 *
 * Says "filled" when both have filled. Exits with 1 and says what is wrong where a byte is. */

#include <pthread.h>
#include <string.h>

#include "pages.h"
#include "tiermgr.h"

struct worker {
    tiermgr_client *client;
    const char *name;
    size_t bytes;
    uint64_t rounds;
    struct pages pages;
    pthread_t thread;
};

static void must(tiermgr_status status, const char *what)
{
    if (status == TIERMGR_OK)
        return;
    fprintf(stderr, "%s: %s: %s\n", what, tiermgr_status_name(status), tiermgr_last_error());
    exit(1);
}

static void begin(struct worker *worker)
{
    void *memory;

    must(tiermgr_connect(NULL, &worker->client), "connect");
    must(tiermgr_alloc(worker->client, worker->bytes, 0, &memory), "alloc");
    worker->pages = fill_pages(memory, worker->bytes);
}

static void *work(void *argument)
{
    struct worker *worker = argument;

    for (uint64_t round = 0; round < worker->rounds; round++) {
        check(&worker->pages, worker->name);
        change(&worker->pages, round * worker->pages.count, 4);
    }
    check(&worker->pages, worker->name);
    return NULL;
}

static void start(struct worker *worker)
{
    if (pthread_create(&worker->thread, NULL, work, worker) != 0)
        exit(1);
}

int main(int argc, char **argv)
{
    size_t bytes = argc == 4 ? strtoul(argv[2], NULL, 10) * MIB : 0;
    uint64_t rounds = argc == 4 ? strtoul(argv[3], NULL, 10) : 0;
    struct worker first = {.name = "the first client", .bytes = bytes, .rounds = rounds};
    struct worker second = {.name = "the second client", .bytes = bytes, .rounds = rounds};
    int leaves = argc > 1 && strcmp(argv[1], "leave") == 0;

    if (bytes == 0 || !(leaves || strcmp(argv[1], "stay") == 0)) {
        fprintf(stderr, "usage: %s leave|stay MIB ROUNDS\n", argv[0]);
        return 2;
    }
    begin(&first);
    begin(&second);
    puts("filled");
    fflush(stdout);
    start(&second);
    if (!leaves) {
        start(&first);
        pthread_join(first.thread, NULL);
    }
    must(tiermgr_disconnect(first.client), "disconnect of the first");
    pthread_join(second.thread, NULL);
    must(tiermgr_disconnect(second.client), "disconnect of the second");
    return 0;
}
