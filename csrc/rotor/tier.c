#include "tier.h"

#include "checksum.h"
#include "probe.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <sys/statfs.h>
#endif

enum { SECTOR_LEAST = 512, SECTOR_MOST = 4096, PIECE_BYTES = 8 << 20 };

struct rotor_tier {
    int fd;
    bool is_open;
    bool is_direct;
    bool is_closing;
    bool is_moving;
    int64_t sector;
    int64_t reserved;
    pid_t process;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t begun;
    pthread_cond_t done;
    rotor_transfer_t *first;
    rotor_transfer_t *last;
    char *block; /* allocation that holds `edges` */
    char *edges; /* two aligned sectors: before and after the whole ones */
};

static int open_named(const char *directory, const char *name, int flags) {
    char path[PATH_MAX];
    int length = snprintf(path, sizeof(path), "%s/%s", directory, name);
    if (length < 0 || (size_t)length >= sizeof(path)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    return open(path, O_CREAT | O_TRUNC | O_NOFOLLOW | O_RDWR | O_CLOEXEC | flags,
                S_IRUSR | S_IWUSR);
}

static int open_unnamed(const char *directory, int flags) {
    int fd = -1;
#ifdef O_TMPFILE
    fd = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC | flags, S_IRUSR | S_IWUSR);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) {
        return fd;
    }
#endif
    char path[PATH_MAX];
    int length = snprintf(path, sizeof(path), "%s/.rotor-tier-XXXXXX", directory);
    if (length < 0 || (size_t)length >= sizeof(path)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    fd = mkstemp(path);
    if (fd < 0) {
        return -1;
    }
    (void)unlink(path);
    int status = fcntl(fd, F_GETFL);
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) != 0 || status < 0 ||
        (flags != 0 && fcntl(fd, F_SETFL, status | flags) != 0)) {
        int error = errno;
        (void)close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

#ifdef O_DIRECT
/* One sector at the file's begin, written and read back; true if the device takes that size. */
static bool takes_sector(int fd, char *aligned, int64_t sector) {
    memset(aligned, 0, (size_t)sector);
    return pwrite(fd, aligned, (size_t)sector, 0) == sector &&
           pread(fd, aligned, (size_t)sector, 0) == sector;
}

/* The sector of a file that was opened with O_DIRECT; 0: it would go through the page cache. */
static int64_t direct_sector(int fd, char *aligned) {
#ifdef __linux__
    enum { IN_MEMORY = 0x01021994 };
    const unsigned long ram = 0x858458f6UL;
    struct statfs system;
    if (fstatfs(fd, &system) == 0 && ((unsigned long)system.f_type == IN_MEMORY ||
                                      (unsigned long)system.f_type == ram)) {
        return 0;
    }
#endif
#ifdef STATX_DIOALIGN
    struct statx found;
    memset(&found, 0, sizeof(found));
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) == 0 &&
        (found.stx_mask & STATX_DIOALIGN) != 0 &&
        (found.stx_dio_mem_align == 0 || found.stx_dio_offset_align > SECTOR_MOST)) {
        return 0;
    }
#endif
    for (int64_t sector = SECTOR_LEAST; sector <= SECTOR_MOST; sector *= 2) {
        if (takes_sector(fd, aligned, sector)) {
            return sector;
        }
    }
    return 0;
}
#endif

/* Drops a piece of a buffered file from the page cache, once it is on the disk. */
static void forget_piece(int fd, bool writes, int64_t offset, int64_t bytes) {
#ifdef __linux__
    if (writes) {
        (void)sync_file_range(fd, offset, bytes,
                              SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                                  SYNC_FILE_RANGE_WAIT_AFTER);
    }
    (void)posix_fadvise(fd, offset, bytes, POSIX_FADV_DONTNEED);
#else
    (void)fd, (void)writes, (void)offset, (void)bytes;
#endif
}

/* Moves the parts of a buffer, which follow one another in the file; an errno, or 0. */
static int move_parts(const rotor_tier_t *tier, bool writes, struct iovec *parts, int count,
                      int64_t offset) {
    while (count > 0) {
        struct iovec now[3];
        size_t room = PIECE_BYTES;
        int used = 0;
        for (; used < count && room > 0; used++) {
            now[used] = parts[used];
            now[used].iov_len = parts[used].iov_len < room ? parts[used].iov_len : room;
            room -= now[used].iov_len;
        }
        ssize_t moved = writes ? pwritev(tier->fd, now, used, offset)
                               : preadv(tier->fd, now, used, offset);
        if (moved < 0 && errno == EINTR) {
            continue;
        }
        if (moved <= 0 || moved % tier->sector != 0) {
            return moved < 0 ? errno : EIO;
        }
        if (!tier->is_direct) {
            forget_piece(tier->fd, writes, offset, moved);
        }
        offset += moved;
        for (size_t left = (size_t)moved; left > 0;) {
            size_t taken = parts->iov_len < left ? parts->iov_len : left;
            parts->iov_base = (char *)parts->iov_base + taken;
            parts->iov_len -= taken;
            left -= taken;
            if (parts->iov_len == 0) {
                parts++;
                count--;
            }
        }
    }
    return 0;
}

/* Moves a buffer, with two sectors for its edges, and notes its error, time and checksum. */
static void move(const rotor_tier_t *tier, char *edges, rotor_transfer_t *transfer) {
    const int64_t one = 1;
    int64_t begun = rotor_clock_ns();
    int64_t sector = tier->sector;
    int64_t head = (int64_t)((0 - (uintptr_t)transfer->memory) & (uintptr_t)(sector - 1));
    head = rotor_min(head, transfer->bytes);
    int64_t whole = (transfer->bytes - head) / sector * sector;
    int64_t tail = transfer->bytes - head - whole;
    char *before = edges;
    char *after = edges + sector;
    char *end = transfer->memory + head + whole;
    struct iovec parts[3];
    int count = 0;

    if (head > 0) {
        parts[count++] = (struct iovec){before, (size_t)sector};
    }
    if (whole > 0) {
        parts[count++] = (struct iovec){transfer->memory + head, (size_t)whole};
    }
    if (tail > 0) {
        parts[count++] = (struct iovec){after, (size_t)sector};
    }
    if (transfer->writes) {
        (void)rotor_checksum(transfer->memory, 1, 1, &transfer->bytes, &one, &transfer->sum);
        memcpy(before, transfer->memory, (size_t)head);
        memcpy(after, end, (size_t)tail);
    }
    int error = move_parts(tier, transfer->writes, parts, count, transfer->offset);
    if (error == 0 && !transfer->writes) {
        memcpy(transfer->memory, before, (size_t)head);
        memcpy(end, after, (size_t)tail);
        (void)rotor_checksum(transfer->memory, 1, 1, &transfer->bytes, &one, &transfer->sum);
    }
    transfer->error = error;
    transfer->busy_ns = rotor_clock_ns() - begun;
}

static void *serve(void *argument) {
    rotor_tier_t *tier = argument;
    pthread_mutex_lock(&tier->mutex);
    for (;;) {
        while (tier->first == NULL && !tier->is_closing) {
            pthread_cond_wait(&tier->begun, &tier->mutex);
        }
        rotor_transfer_t *transfer = tier->first;
        if (transfer == NULL) {
            break;
        }
        tier->first = transfer->next;
        if (tier->first == NULL) {
            tier->last = NULL;
        }
        tier->is_moving = true;
        pthread_mutex_unlock(&tier->mutex);
        move(tier, tier->edges, transfer);
        pthread_mutex_lock(&tier->mutex);
        transfer->is_done = true;
        tier->is_moving = false;
        pthread_cond_broadcast(&tier->done);
    }
    pthread_mutex_unlock(&tier->mutex);
    return NULL;
}

/* Starts the thread with all signals blocked: they are for the threads of the program. */
static int start(rotor_tier_t *tier) {
    sigset_t all, before;
    sigfillset(&all);
    int error = pthread_sigmask(SIG_SETMASK, &all, &before);
    if (error == 0) {
        error = pthread_create(&tier->thread, NULL, serve, tier);
        (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    return error;
}

int rotor_tier_open(const char *directory, const char *name, bool buffered, rotor_tier_t **tier,
                    int *error) {
    rotor_tier_t *made = rotor_calloc(1, sizeof(*made));
    int ret = ROTOR_ERR_NO_MEMORY;
    int flags = 0;

    *error = 0;
    if (made == NULL) {
        return ret;
    }
    made->fd = -1;
    made->sector = 1;
    made->process = getpid();
    made->is_direct = !buffered;
    if ((made->block = rotor_calloc(3, SECTOR_MOST)) == NULL) {
        goto fail;
    }
    made->edges = made->block + ((0 - (uintptr_t)made->block) & (SECTOR_MOST - 1));
#ifdef O_DIRECT
    flags = buffered ? 0 : O_DIRECT;
#else
    ret = ROTOR_ERR_UNAVAILABLE;
    if (!buffered) {
        goto fail;
    }
#endif
    made->fd = name == NULL ? open_unnamed(directory, flags) : open_named(directory, name, flags);
    if (made->fd < 0) {
        *error = errno;
        ret = !buffered && errno == EINVAL ? ROTOR_ERR_UNAVAILABLE : ROTOR_ERR_IO;
        goto fail;
    }
#ifdef O_DIRECT
    if (!buffered && (made->sector = direct_sector(made->fd, made->edges)) == 0) {
        ret = ROTOR_ERR_UNAVAILABLE;
        goto fail;
    }
#endif
    if ((*error = pthread_mutex_init(&made->mutex, NULL)) != 0 ||
        (*error = pthread_cond_init(&made->begun, NULL)) != 0 ||
        (*error = pthread_cond_init(&made->done, NULL)) != 0 || (*error = start(made)) != 0) {
        ret = ROTOR_ERR_IO;
        goto fail;
    }
    made->is_open = true;
    *tier = made;
    return ROTOR_OK;
fail:
    if (made->fd >= 0) {
        (void)close(made->fd);
    }
    rotor_free(made->block);
    rotor_free(made);
    return ret;
}

static bool is_ours(const rotor_tier_t *tier) { return tier->process == getpid(); }

void rotor_tier_close(rotor_tier_t *tier) {
    if (!tier->is_open) {
        return;
    }
    tier->is_open = false;
    if (is_ours(tier)) {
        pthread_mutex_lock(&tier->mutex);
        tier->is_closing = true;
        pthread_cond_signal(&tier->begun);
        pthread_mutex_unlock(&tier->mutex);
        (void)pthread_join(tier->thread, NULL);
    }
    (void)close(tier->fd);
}

void rotor_tier_free(rotor_tier_t *tier) {
    if (tier == NULL) {
        return;
    }
    rotor_tier_close(tier);
    if (is_ours(tier)) {
        (void)pthread_cond_destroy(&tier->done);
        (void)pthread_cond_destroy(&tier->begun);
        (void)pthread_mutex_destroy(&tier->mutex);
    }
    rotor_free(tier->block);
    rotor_free(tier);
}

int64_t rotor_tier_sector(const rotor_tier_t *tier) { return tier->sector; }

int64_t rotor_tier_room(int64_t sector, int64_t bytes) {
    return sector == 1 ? bytes : ((bytes + sector - 1) / sector + 1) * sector;
}

int rotor_tier_reserve(rotor_tier_t *tier, int64_t bytes, int *error) {
    *error = 0;
    if (!tier->is_open || !is_ours(tier)) {
        return ROTOR_ERR_UNAVAILABLE;
    }
    if (bytes <= tier->reserved) {
        return ROTOR_OK;
    }
    do {
        *error = posix_fallocate(tier->fd, 0, bytes);
    } while (*error == EINTR);
    if (*error != 0) {
        /* What a failed attempt took would be missing on the disk. */
        (void)!ftruncate(tier->fd, tier->reserved);
        return ROTOR_ERR_IO;
    }
    tier->reserved = bytes;
    return ROTOR_OK;
}

/* Reads in a process that has no thread for it; several threads of it may do so at a time. */
static void read_here(const rotor_tier_t *tier, rotor_transfer_t *transfer) {
    char block[3 * SECTOR_MOST];
    char *edges = block + ((0 - (uintptr_t)block) & (SECTOR_MOST - 1));
    move(tier, edges, transfer);
    transfer->is_done = true;
}

int rotor_tier_begin(rotor_tier_t *tier, rotor_transfer_t *transfer) {
    bool is_here = is_ours(tier);
    if (!tier->is_open || (!is_here && transfer->writes)) {
        return ROTOR_ERR_UNAVAILABLE;
    }
    transfer->error = 0;
    transfer->sum = 0;
    transfer->busy_ns = 0;
    transfer->is_done = false;
    transfer->next = NULL;
    if (!is_here) {
        read_here(tier, transfer);
        return ROTOR_OK;
    }
    pthread_mutex_lock(&tier->mutex);
    if (tier->last == NULL) {
        tier->first = transfer;
    } else {
        tier->last->next = transfer;
    }
    tier->last = transfer;
    pthread_cond_signal(&tier->begun);
    pthread_mutex_unlock(&tier->mutex);
    return ROTOR_OK;
}

int rotor_tier_wait(rotor_tier_t *tier, rotor_transfer_t *transfer, int64_t most_ns) {
    struct timespec end;
    int late = 0;

    if (!is_ours(tier)) {
        /* Done here, or by the thread of the other process before it forked, or never. */
        if (!transfer->is_done) {
            return ROTOR_ERR_UNAVAILABLE;
        }
        return transfer->error == 0 ? ROTOR_OK : ROTOR_ERR_IO;
    }
    (void)clock_gettime(CLOCK_REALTIME, &end);
    int64_t ns = end.tv_nsec + most_ns;
    end.tv_sec += (time_t)(ns / 1000000000);
    end.tv_nsec = (long)(ns % 1000000000);
    pthread_mutex_lock(&tier->mutex);
    while (!transfer->is_done && late == 0) {
        late = pthread_cond_timedwait(&tier->done, &tier->mutex, &end);
    }
    bool is_done = transfer->is_done;
    pthread_mutex_unlock(&tier->mutex);
    if (!is_done) {
        return ROTOR_ERR_INTERRUPTED;
    }
    return transfer->error == 0 ? ROTOR_OK : ROTOR_ERR_IO;
}

void rotor_tier_drain(rotor_tier_t *tier) {
    if (!tier->is_open || !is_ours(tier)) {
        return;
    }
    pthread_mutex_lock(&tier->mutex);
    while (tier->first != NULL || tier->is_moving) {
        pthread_cond_wait(&tier->done, &tier->mutex);
    }
    pthread_mutex_unlock(&tier->mutex);
}
