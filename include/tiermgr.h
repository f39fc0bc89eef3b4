/* tiermgr: memory that may be larger than DRAM.
 *
 * A client connects to tiermgrd and makes regions. A region is ordinary private memory of the
 * process: it is read and written through plain pointers, and copied on fork like any other. Bytes
 * that are not in use may lie on another tier; an access to them waits until they are back.
 *
 * For every function below:
 *  - sizes are bytes; an address or a length given to a range function must be a multiple of
 *    tiermgr_page_size() and the range must lie inside one region or one allocation. With
 *    libtiermgr_preload.so in the process an allocation may also be one that malloc manages;
 *  - the result is TIERMGR_OK or a negative tiermgr_status, and out-parameters are written only on
 *    TIERMGR_OK; after a failure tiermgr_last_error() tells the cause and the next step in words;
 *  - any thread may call at any time, also with the same client; calls of one client are answered
 *    one after the other, so that each waits for those before it, a tiermgr_pin among them.
 *    tiermgr_free does not: see there;
 *  - a call that asks the daemon waits for its answer, normally some tens of microseconds. While the
 *    daemon restarts it waits up to two seconds and then gives TIERMGR_E_CONNECTION_LOST. A call that
 *    the daemon died over gives it at once where carrying it out twice could do harm. Those that may
 *    wait for a device say so: where it does not answer, tiermgr_pin gives up after ten minutes and
 *    the others after one, with TIERMGR_E_INTERNAL;
 *  - besides what a function lists, each that asks the daemon may give CONNECTION_LOST,
 *    SHUTTING_DOWN, INTERNAL, PROTOCOL and SYSTEM, and NOT_PERMITTED in a process that is not served;
 *  - after CONNECTION_LOST, SHUTTING_DOWN and INTERNAL nobody knows whether the daemon carried out
 *    what it was asked, and it may still do so. Functions for which that matters say what holds then;
 *  - no function is async-signal-safe: one that is called by a handler which has interrupted the
 *    library gives INSIDE at best;
 *  - a pointer argument must not be NULL unless the function says that it may be.
 *
 * If bytes are lost (a device failed and there is no other copy) the access raises SIGBUS. It never
 * reads zeros or stale bytes.
 *
 * fork(): the child has a copy of all memory, as always. A client stays usable in the child, which
 * joins the parent's family: they share one limit. Leases are the parent's alone. fork() waits for
 * calls of other threads that are under way, up to two seconds until the daemon greets and five until
 * it answers, and on a machine that is overloaded up to twelve until the child's helper runs. vfork()
 * and posix_spawn() are not affected. The child of a raw clone(), or of _Fork(), can use the memory but not
 * the client, whose functions give NOT_PERMITTED. Where a signal handler that has interrupted the library
 * forks, the child asks for itself what its parent was asking for, and joins the family with that.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef TIERMGR_H
#define TIERMGR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TIERMGR_VERSION_MAJOR 0
#define TIERMGR_VERSION_MINOR 1
#define TIERMGR_VERSION_PATCH 0

#if defined(__GNUC__)
#define TIERMGR_API __attribute__((visibility("default")))
#else
#define TIERMGR_API
#endif

/* ---- results ------------------------------------------------------------------------------- */

typedef enum tiermgr_status {
    TIERMGR_OK = 0,

    /* Told by the daemon. */
    TIERMGR_E_INVALID_ARGUMENT = -1, /* an argument is wrong */
    TIERMGR_E_NOT_MANAGED = -2,      /* the range is not in one region or allocation of this client */
    TIERMGR_E_NO_ROOM = -3,          /* a limit is reached, or no tier has room */
    TIERMGR_E_NOT_PERMITTED = -4,    /* the caller may not do this */
    TIERMGR_E_UNSUPPORTED = -5,      /* this daemon or this kernel cannot do it */
    TIERMGR_E_VERSION = -6,          /* library and daemon are of different versions */
    TIERMGR_E_PROTOCOL = -7,         /* library and daemon misunderstood each other */
    TIERMGR_E_DATA_LOST = -8,        /* a device failed and bytes of the range were lost */
    TIERMGR_E_SHUTTING_DOWN = -9,    /* the daemon is ending */
    TIERMGR_E_INTERNAL = -10,        /* no answer in time, or a defect; the daemon's log tells more */

    /* Found out by the library. */
    TIERMGR_E_NO_DAEMON = -32,       /* nobody listens on the socket */
    TIERMGR_E_CONNECTION_LOST = -33, /* the daemon is away; try again later */
    TIERMGR_E_NO_MEMORY = -34,       /* the process has no address space or memory left */
    TIERMGR_E_SYSTEM = -35,          /* the kernel refused something */
    TIERMGR_E_TOO_MANY_CLIENTS = -36, /* the process has 16 clients already */
    TIERMGR_E_INSIDE = -37            /* called by a signal handler that has interrupted the library */
} tiermgr_status;

/* A short fixed name such as "NO_DAEMON"; "UNKNOWN" for other numbers. Never NULL, never freed. */
TIERMGR_API const char *tiermgr_status_name(tiermgr_status status);

/* What the last failed call of this thread had to say, in one line of English. Never NULL; empty if
 * nothing failed yet. Valid until this thread's next call into the library. */
TIERMGR_API const char *tiermgr_last_error(void);

/* "MAJOR.MINOR.PATCH" of the library. Never NULL, never freed. */
TIERMGR_API const char *tiermgr_version(void);

/* Bytes of a page on this machine. */
TIERMGR_API size_t tiermgr_page_size(void);

/* ---- connection ---------------------------------------------------------------------------- */

typedef struct tiermgr_client tiermgr_client;

/* Who gives way to whom when memory is short. */
typedef enum tiermgr_class {
    TIERMGR_CLASS_DEFAULT = 0,  /* for a client: standard; for a region: its client's */
    TIERMGR_CLASS_LATENCY = 1,  /* keeps its room longest */
    TIERMGR_CLASS_STANDARD = 2,
    TIERMGR_CLASS_BULK = 3      /* gives way first */
} tiermgr_class;

/* Zero means "default" in every member but size. */
typedef struct tiermgr_client_options {
    uint32_t size;      /* sizeof(tiermgr_client_options) as the caller was compiled */
    uint32_t class_;    /* a tiermgr_class */
    const char *socket; /* path; NULL: $TIERMGR_SOCKET, else /run/tiermgr/tiermgrd.sock */
    const char *name;   /* shown in lists, at most 64 bytes; NULL: the name of the program */
} tiermgr_client_options;

/* Connects this process to the daemon. Starts one small process, "tiermgr-helper", which ends with
 * this one and which wait() sees with __WALL only. `options` may be NULL.
 * blocks: until the daemon has answered, at most some ten seconds; on a machine that is overloaded,
 * where the helper has to wait for its turn, up to half a minute.
 * errors: INVALID_ARGUMENT (a bad option), UNSUPPORTED (an option of a later version, or this
 * machine), NO_DAEMON, VERSION, NOT_PERMITTED, NO_ROOM, TOO_MANY_CLIENTS, NO_MEMORY. */
TIERMGR_API tiermgr_status tiermgr_connect(const tiermgr_client_options *options,
                                           tiermgr_client **client_out);

/* Ends the connection. All regions and allocations of the client are freed with their bytes: no
 * pointer into them and no handle of them may be used any more, nor the client. Other threads must
 * have left the library. `client` may be NULL: nothing happens.
 * blocks: until the device has done what it began for this memory.
 * errors: those of every function. After each the connection has ended all the same; memory stays
 * reserved until the process ends where nobody confirmed that nothing of it is still in motion. */
TIERMGR_API tiermgr_status tiermgr_disconnect(tiermgr_client *client);

/* ---- regions ------------------------------------------------------------------------------- */

typedef struct tiermgr_region tiermgr_region;

/* What the pages of a region are. */
typedef enum tiermgr_backing {
    TIERMGR_BACKING_DEFAULT = 0, /* private */
    TIERMGR_BACKING_PRIVATE = 1, /* private anonymous memory */
    TIERMGR_BACKING_SHARED = 2   /* a memfd: refused with UNSUPPORTED by this version */
} tiermgr_backing;

/* What lies in a region; sets defaults of the policy. */
typedef enum tiermgr_kind {
    TIERMGR_KIND_HEAP = 0,
    TIERMGR_KIND_WEIGHTS = 1,   /* written once, read in order */
    TIERMGR_KIND_KV = 2,        /* a key-value cache */
    TIERMGR_KIND_ACTIVATION = 3
} tiermgr_kind;

/* Zero means "default" in every member but size. */
typedef struct tiermgr_region_options {
    uint32_t size;    /* sizeof(tiermgr_region_options) as the caller was compiled */
    uint32_t backing; /* a tiermgr_backing */
    uint32_t class_;  /* a tiermgr_class; one other than the client's: UNSUPPORTED */
    uint32_t kind;    /* a tiermgr_kind */
    const char *name; /* shown in lists, at most 64 bytes; may be NULL */
} tiermgr_region_options;

/* Makes a region of at least `bytes`, rounded up to 2 MiB, zeroed, aligned to 2 MiB. It costs
 * address space only, until it is touched. `options` may be NULL.
 * errors: INVALID_ARGUMENT (size 0, a bad option), UNSUPPORTED (an option, see there), NO_ROOM,
 * NO_MEMORY (no address space). Without an answer the range stays reserved for a later call. */
TIERMGR_API tiermgr_status tiermgr_region_create(tiermgr_client *client, size_t bytes,
                                                 const tiermgr_region_options *options,
                                                 tiermgr_region **region_out);

/* Frees a region and its bytes. The addresses become invalid, and so does the handle. `region` may
 * be NULL: nothing happens.
 * blocks: until the device has done what it began for this memory.
 * errors: INVALID_ARGUMENT (no region of its client). After every other error the handle stays good
 * and the addresses reserved, but the bytes may be gone: call again later. */
TIERMGR_API tiermgr_status tiermgr_region_destroy(tiermgr_region *region);

/* First byte of the region. Asks nobody, never fails. */
TIERMGR_API void *tiermgr_region_address(const tiermgr_region *region);

/* Length of the region. Asks nobody, never fails. */
TIERMGR_API size_t tiermgr_region_bytes(const tiermgr_region *region);

/* ---- allocations --------------------------------------------------------------------------- */

/* Allocates `bytes`, rounded up to whole pages, in an arena of the client. For blocks from some
 * hundred kilobytes up; contents are undefined. `alignment` is 0 (a page) or a power of two up to
 * 1 GiB. Asks the daemon when the arenas must grow, and, before memory is refused, what became of
 * frees that it has not confirmed yet.
 * blocks: for such an answer; before NO_ROOM and NO_MEMORY a second or more, and up to half a minute where
 * the daemon still works at one. Where a call has waited for the daemon in vain others do not wait for it: it
 * is away to them at once, but about once a second one looks whether it is back.
 * errors: INVALID_ARGUMENT (size 0, bad alignment), NO_ROOM, NO_MEMORY. */
TIERMGR_API tiermgr_status tiermgr_alloc(tiermgr_client *client, size_t bytes, size_t alignment,
                                         void **address_out);

/* The same, and all bytes are zero. */
TIERMGR_API tiermgr_status tiermgr_alloc_zeroed(tiermgr_client *client, size_t bytes,
                                                size_t alignment, void **address_out);

/* Frees an allocation. `address` may be NULL: nothing happens. Freed bytes are kept for the next
 * allocation up to a limit; beyond it the daemon is told to forget them, and until it has confirmed
 * that they are given to nobody.
 * blocks: a quarter of a second where the daemon waits for a device, once for each such wait. In a
 * forked child that the daemon has not served yet, up to two seconds, and as in fork() until its helper
 * runs; then ten times as long not again. Never for calls of other threads.
 * errors: INVALID_ARGUMENT (not the address of a live allocation of this client). */
TIERMGR_API tiermgr_status tiermgr_free(tiermgr_client *client, void *address);

/* ---- ranges -------------------------------------------------------------------------------- */

typedef enum tiermgr_advice {
    TIERMGR_ADVICE_NORMAL = 0,      /* no advice any more */
    TIERMGR_ADVICE_WILLNEED = 1,    /* will be needed soon */
    TIERMGR_ADVICE_COLD = 2,        /* will not be needed for a while: let it go first */
    TIERMGR_ADVICE_SEQUENTIAL = 3,  /* read in ascending order */
    TIERMGR_ADVICE_RANDOM = 4,      /* in no order: do not read ahead */
    TIERMGR_ADVICE_CYCLIC = 5,      /* in ascending order, again and again */
    TIERMGR_ADVICE_READ_MOSTLY = 6, /* written rarely */
    TIERMGR_ADVICE_DONTNEED = 7     /* drop the bytes now: they read as zeros afterwards */
} tiermgr_advice;

/* Tells how a range will be used. Changes no byte, DONTNEED apart.
 * blocks: for DONTNEED until the device has done what it began for this memory.
 * errors: INVALID_ARGUMENT, NOT_MANAGED; for DONTNEED also UNSUPPORTED (nobody can drop the bytes,
 * because the range is locked with mlock or the helper of this process has ended: overwrite them).
 * After an error of DONTNEED each page is as before or reads as zeros. After CONNECTION_LOST,
 * SHUTTING_DOWN and INTERNAL pages may be dropped at any later time: write nothing there until
 * another DONTNEED of the same range has succeeded. To free the allocation or region is safe. */
TIERMGR_API tiermgr_status tiermgr_advise(tiermgr_client *client, void *address, size_t bytes,
                                          tiermgr_advice advice);

/* Starts to bring a range in and returns without waiting for it.
 * errors: INVALID_ARGUMENT, NOT_MANAGED. */
TIERMGR_API tiermgr_status tiermgr_prefetch(tiermgr_client *client, void *address, size_t bytes);

/* Brings a range in and holds it in memory until the lease ends: for DMA, vmsplice, GPU kernels,
 * stacks. The lease ends with tiermgr_unpin, with the client, or with the process; one of memory that
 * malloc manages does not end with the client.
 * blocks: until all of the range is in memory, ten minutes at most.
 * errors: INVALID_ARGUMENT, NOT_MANAGED, NO_ROOM (more than may be held), DATA_LOST. Without an
 * answer the range may be held until the process ends. */
TIERMGR_API tiermgr_status tiermgr_pin(tiermgr_client *client, void *address, size_t bytes,
                                       uint64_t *lease_out);

/* Ends a lease.
 * errors: INVALID_ARGUMENT (no such lease). */
TIERMGR_API tiermgr_status tiermgr_unpin(tiermgr_client *client, uint64_t lease);

/* Where the bytes of a range are. The members after size add up to the length of the range. */
typedef struct tiermgr_residency {
    uint32_t size;           /* in: sizeof(tiermgr_residency) as the caller was compiled */
    uint32_t reserved;
    uint64_t resident_bytes; /* in memory */
    uint64_t parked_bytes;   /* on another tier only */
    uint64_t absent_bytes;   /* never touched, or dropped: reads as zeros */
    uint64_t unarmed_bytes;  /* native memory, touched or not */
    uint64_t poisoned_bytes; /* lost: an access raises SIGBUS */
} tiermgr_residency;

/* A snapshot; it may be out of date when the call returns.
 * errors: INVALID_ARGUMENT, NOT_MANAGED. */
TIERMGR_API tiermgr_status tiermgr_residency_query(tiermgr_client *client, const void *address,
                                                   size_t bytes, tiermgr_residency *residency);

/* ---- statistics ---------------------------------------------------------------------------- */

/* Counters of the client and its forked descendants together; not of what malloc manages, which is
 * another client. Those named *_now_bytes go up and down, the others only grow. */
typedef struct tiermgr_statistics {
    uint32_t size;               /* in: sizeof(tiermgr_statistics) as the caller was compiled */
    uint32_t reserved;
    uint64_t faults;             /* page faults that the daemon served */
    uint64_t recalled_pages;     /* brought in because of a touch */
    uint64_t prefetched_pages;   /* brought in ahead of one */
    uint64_t zeroed_pages;       /* installed as zeros */
    uint64_t rescued_pages;      /* touched while they were about to leave */
    uint64_t parked_pages;       /* left memory */
    uint64_t parked_clean_pages; /* of these, without a write: the copy was still valid */
    uint64_t store_written_bytes;
    uint64_t store_read_bytes;
    uint64_t store_errors;
    uint64_t poisoned_pages;     /* lost */
    uint64_t forks;              /* followed */
    uint64_t dram_now_bytes;     /* in memory, limbo and credit included */
    uint64_t limbo_now_bytes;    /* of these, about to leave */
    uint64_t credit_now_bytes;   /* of these, granted and native */
    uint64_t parked_now_bytes;   /* on another tier only */
    uint64_t budget_now_bytes;   /* what the family may have in memory */
    uint64_t pinned_now_bytes;   /* held by leases */
} tiermgr_statistics;

/* errors: INVALID_ARGUMENT. */
TIERMGR_API tiermgr_status tiermgr_statistics_query(tiermgr_client *client,
                                                    tiermgr_statistics *statistics);

#ifdef __cplusplus
}
#endif

#endif /* TIERMGR_H */
