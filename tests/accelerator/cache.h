// The caching allocator of a device: the rules of PyTorch's native one for CUDA.
#pragma once

#include "sim.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <vector>

namespace sim {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

namespace {

constexpr size_t kKiB = 1024, kMiB = 1024 * kKiB;
constexpr size_t kUnit = 512;                 // Blocks are multiples of this.
constexpr size_t kLargestSmall = kMiB;        // Blocks up to here come from the small pool.
constexpr size_t kSmallSegment = 2 * kMiB;
constexpr size_t kLargeSegment = 20 * kMiB;
constexpr size_t kOwnSegment = 10 * kMiB;     // Blocks from here on get a segment of their own,
constexpr size_t kOwnUnit = 2 * kMiB;         // a multiple of this.

size_t multiple(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }
size_t block_size(size_t bytes) { return std::max(multiple(bytes, kUnit), kUnit); }
size_t segment_size(size_t block) {
    if (block <= kLargestSmall) {
        return kSmallSegment;
    }
    return block < kOwnSegment ? kLargeSegment : multiple(block, kOwnUnit);
}
bool leaves_rest(size_t rest, bool fine) { return fine ? rest >= kUnit : rest > kMiB; }
size_t piece_size(bool small) { return small ? kSmallSegment : kLargeSegment; }

// Addresses ascend from one segment to the next: runs repeat, ties of best fit included.
char *map_memory(size_t size, size_t alignment, int protection) {
    static char *next = reinterpret_cast<char *>(0x100000000000);
    auto place = multiple(reinterpret_cast<uintptr_t>(next), alignment);
    void *found = mmap(reinterpret_cast<void *>(place), size, protection,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (found == MAP_FAILED) {
        return nullptr;
    }
    next = static_cast<char *>(found) + size;
    return static_cast<char *>(found);
}

struct BestFit {
    bool operator()(const Block *a, const Block *b) const {
        return std::make_tuple(a->owner, a->stream, a->size,
                               reinterpret_cast<uintptr_t>(a->address)) <
               std::make_tuple(b->owner, b->stream, b->size,
                               reinterpret_cast<uintptr_t>(b->address));
    }
};
using Pool = std::set<Block *, BestFit>;

struct Place {  // Whose free blocks are looked at.
    int owner, stream;
};

struct Waiting {
    Moment moment;
    Block *block;
};

class Cache {
  public:
    int index = 0;
    size_t capacity = 256 * kMiB;
    size_t taken = 0;  // By contexts and other processes.
    double fraction = 1.0;
    size_t reserved = 0;
    DeviceStats stats;
    bool expandable = false;
    std::map<char *, Block *> segments;  // The first block of each by its address.

    std::set<int> private_pools;  // Those in use: what they have cached is not given back.

    Block *take(size_t bytes, Place place) {
        harvest(false);
        size_t size = block_size(bytes);
        bool small = size <= kLargestSmall;
        Block *block = best_free(size, place, small);
        if (!block) {
            block = from_device(size, place, small);
        }
        if (!block) {
            stats.num_alloc_retries++;
            synchronize_device(index);
            release();
            block = from_device(size, place, small);
        }
        if (!block) {
            refuse(size, bytes);
        }
        split(block, size);
        block->allocated = true;
        block->requested = bytes;
        count(small, stats.allocation, 1);
        count(small, stats.allocated_bytes, signed_of(block->size));
        count(small, stats.requested_bytes, signed_of(bytes));
        count(small, stats.active, 1);
        count(small, stats.active_bytes, signed_of(block->size));
        return block;
    }

    void give(Block *block) {
        block->allocated = false;
        count(block->small, stats.allocation, -1);
        count(block->small, stats.allocated_bytes, -signed_of(block->size));
        count(block->small, stats.requested_bytes, -signed_of(block->requested));
        for (int stream : block->other_streams) {
            block->waits++;
            waiting_.push_back({moment_now(index, stream), block});
        }
        block->other_streams.clear();
        if (!block->waits) {
            make_free(block);
        }
    }

    // Return what is cached and in one piece to the device.
    void release() {
        harvest(true);
        for (Pool *pool : {&small_, &large_}) {
            std::vector<Block *> growing;
            for (auto at = pool->begin(); at != pool->end();) {
                Block *block = *at;
                if (private_pools.count(block->owner)) {
                    ++at;
                    continue;
                }
                if (block->expandable) {
                    growing.push_back(block);
                }
                if (block->previous || block->next || block->expandable) {
                    ++at;
                    continue;
                }
                at = pool->erase(at);
                munmap(block->address, block->size);
                segments.erase(block->address);
                reserved -= block->size;
                count(block->small, stats.segment, -1);
                count(block->small, stats.reserved_bytes, -signed_of(block->size));
                stats.num_device_free++;
                delete block;
            }
            for (Block *block : growing) {
                give_back(block);
            }
        }
    }

    // Drop the ranges that have no memory at all.
    void drop_empty_ranges() {
        for (bool small : {true, false}) {
            auto &found = holes(small);
            for (auto at = found.begin(); at != found.end();) {
                Block *block = at->second;
                bool is_whole = !block->previous && !block->next;
                at = is_whole ? found.erase(at) : std::next(at);
                if (is_whole) {
                    drop_range(block);
                }
            }
        }
    }

    bool poisons = false;

  private:
    Pool small_, large_;
    using Holes = std::map<std::tuple<int, int, char *>, Block *>;
    Holes small_holes_, large_holes_;  // Parts of ranges that have no memory.
    std::deque<Waiting> waiting_;

    static int64_t signed_of(size_t bytes) { return static_cast<int64_t>(bytes); }

    Holes &holes(bool small) { return small ? small_holes_ : large_holes_; }
    Pool &pool(bool small) { return small ? small_ : large_; }

    static void count(bool small, StatArray &figures, int64_t change) {
        StatType kind = small ? StatType::SMALL_POOL : StatType::LARGE_POOL;
        for (StatType type : {StatType::AGGREGATE, kind}) {
            Stat &stat = figures[static_cast<size_t>(type)];
            if (change >= 0) {
                stat.increase(static_cast<size_t>(change));
            } else {
                stat.decrease(static_cast<size_t>(-change));
            }
        }
    }

    // A free block that is part of a segment counts as an inactive split.
    void count_split(const Block *block, int sign) {
        if (block->previous || block->next) {
            count(block->small, stats.inactive_split, sign);
            count(block->small, stats.inactive_split_bytes, sign * signed_of(block->size));
        }
    }

    void harvest(bool waits) {
        for (auto at = waiting_.begin(); at != waiting_.end();) {
            if (waits) {
                wait_on_host(at->moment);
            }
            if (!has_passed(at->moment)) {
                ++at;
                continue;
            }
            Block *block = at->block;
            at = waiting_.erase(at);
            if (--block->waits == 0) {
                make_free(block);
            }
        }
    }

    static bool is_at(const Block *block, Place place) {
        return block->owner == place.owner && block->stream == place.stream;
    }

    Block *best_free(size_t size, Place place, bool small) {
        Block wanted;
        wanted.owner = place.owner;
        wanted.stream = place.stream;
        wanted.size = size;
        Pool &free_blocks = pool(small);
        auto at = free_blocks.lower_bound(&wanted);
        if (at == free_blocks.end() || !is_at(*at, place)) {
            return nullptr;
        }
        // Rather a larger block than one from which a range could grow further.
        for (auto larger = std::next(at); expandable && larger != free_blocks.end() &&
                                          is_at(*larger, place) && reach(*larger) < reach(*at);
             ++larger) {
            at = larger;
        }
        Block *block = *at;
        free_blocks.erase(at);
        count_split(block, -1);
        return block;
    }

    static size_t reach(const Block *block) {
        bool grows = block->next && !block->next->mapped;
        return block->size + (grows ? block->next->size : 0);
    }

    Block *from_device(size_t size, Place place, bool small) {
        return expandable ? grow(size, place, small)
                          : new_segment(segment_size(size), place, small);
    }

    bool may_take(size_t size) const {
        return reserved + taken + size <= capacity &&
               static_cast<double>(reserved + size) <= static_cast<double>(capacity) * fraction;
    }

    static Holes::key_type key(const Block *block) {
        return {block->owner, block->stream, block->address};
    }
    void open_hole(Block *block) { holes(block->small)[key(block)] = block; }
    void close_hole(Block *block) { holes(block->small).erase(key(block)); }

    // Give memory to the lowest place of a range at which a block of this size fits.
    Block *grow(size_t size, Place place, bool small) {
        Block *block = place_to_grow(size, place, small);
        do {
            Block *hole = block->mapped ? block->next : block;
            size_t missing = size - (block->mapped ? block->size : 0);
            if (!hole || !may_take(std::min(multiple(missing, piece_size(small)), hole->size))) {
                return nullptr;
            }
            block = fill(hole, std::min(multiple(missing, piece_size(small)), hole->size));
        } while (block->size < size);
        pool(small).erase(block);
        count_split(block, -1);
        return block;
    }

    Block *place_to_grow(size_t size, Place place, bool small) {
        auto is_idle = [](Block *block) { return block && !block->allocated && !block->waits; };
        for (auto &[unused, hole] : holes(small)) {
            if (!is_at(hole, place)) {
                continue;
            }
            Block *first = is_idle(hole->previous) ? hole->previous : hole;
            size_t found = 0;
            for (Block *block = first; is_idle(block); block = block->next) {
                found += block->size;
            }
            if (found >= size) {
                return first;
            }
        }
        size_t piece = piece_size(small), bytes = multiple(capacity + capacity / 8, piece);
        char *memory = map_memory(bytes, piece, PROT_NONE);
        TORCH_CHECK(memory, "sim: no addresses are left");
        Block *range = first_block(memory, bytes, place, small);
        range->expandable = true;
        range->mapped = false;
        open_hole(range);
        return range;
    }

    static Block *cut(Block *block, size_t size) {
        auto *rest = new Block(*block);
        rest->address = block->address + size;
        rest->size = block->size - size;
        rest->requested = 0;
        rest->previous = block;
        if (block->next) {
            block->next->previous = rest;
        }
        block->next = rest;
        block->size = size;
        return rest;
    }

    Block *fill(Block *hole, size_t size) {
        close_hole(hole);
        if (size < hole->size) {
            open_hole(cut(hole, size));
        }
        mprotect(hole->address, size, PROT_READ | PROT_WRITE);
        hole->mapped = true;
        reserved += size;
        count(hole->small, stats.reserved_bytes, signed_of(size));
        stats.num_device_alloc++;
        return settle(hole);
    }

    // Take the memory of whole pieces from a free block.
    void give_back(Block *block) {
        size_t piece = piece_size(block->small);
        auto first = reinterpret_cast<uintptr_t>(block->address);
        uintptr_t begin = multiple(first, piece), end = (first + block->size) / piece * piece;
        if (begin >= end) {
            return;
        }
        pool(block->small).erase(block);
        count_split(block, -1);
        Block *middle = begin > first ? cut(block, begin - first) : block;
        if (middle->size > end - begin) {
            Block *rest = cut(middle, end - begin);
            pool(rest->small).insert(rest);
            count_split(rest, 1);
        }
        if (middle != block) {
            pool(block->small).insert(block);
            count_split(block, 1);
        }
        madvise(middle->address, middle->size, MADV_DONTNEED);
        mprotect(middle->address, middle->size, PROT_NONE);
        middle->mapped = false;
        reserved -= middle->size;
        count(middle->small, stats.reserved_bytes, -signed_of(middle->size));
        stats.num_device_free++;
        if (Block *after = middle->next; after && !after->mapped) {
            close_hole(after);
            absorb(middle, after);
        }
        if (Block *before = middle->previous; before && !before->mapped) {
            close_hole(before);
            absorb(before, middle);
            middle = before;
        }
        if (middle->previous || middle->next) {
            open_hole(middle);
            return;
        }
        drop_range(middle);
    }

    void drop_range(Block *range) {
        munmap(range->address, range->size);
        segments.erase(range->address);
        delete range;
    }

    // A block that is all of a segment, or of a range.
    Block *first_block(char *memory, size_t size, Place place, bool small) {
        auto *block = new Block;
        block->device = index;
        block->owner = place.owner;
        block->stream = place.stream;
        block->small = small;
        block->address = memory;
        block->size = size;
        segments[memory] = block;
        return block;
    }

    Block *new_segment(size_t size, Place place, bool small) {
        char *memory = may_take(size) ? map_memory(size, kOwnUnit, PROT_READ | PROT_WRITE) : nullptr;
        if (!memory) {
            return nullptr;
        }
        Block *block = first_block(memory, size, place, small);
        reserved += size;
        count(small, stats.segment, 1);
        count(small, stats.reserved_bytes, signed_of(size));
        stats.num_device_alloc++;
        return block;
    }

    void split(Block *block, size_t size) {
        if (!leaves_rest(block->size - size, block->small || expandable)) {
            return;
        }
        Block *remainder = cut(block, size);
        pool(block->small).insert(remainder);
        count_split(remainder, 1);
    }

    void make_free(Block *block) {
        count(block->small, stats.active, -1);
        count(block->small, stats.active_bytes, -signed_of(block->size));
        if (poisons) {
            // Who uses the memory next comes after what the stream has queued.
            catch_up(block->device, block->stream);
            std::memset(block->address, 0xFF, block->size);
        }
        settle(block);
    }

    // Join a block with the free ones beside it, and list it as free.
    Block *settle(Block *block) {
        if (Block *after = block->next; is_free(after)) {
            join(block, after);
        }
        if (Block *before = block->previous; is_free(before)) {
            pool(block->small).erase(before);
            count_split(before, -1);
            absorb(before, block);
            block = before;
        }
        pool(block->small).insert(block);
        count_split(block, 1);
        return block;
    }

    static bool is_free(const Block *block) {
        return block && !block->allocated && !block->waits && block->mapped;
    }

    void join(Block *block, Block *after) {
        pool(block->small).erase(after);
        count_split(after, -1);
        absorb(block, after);
    }

    static void absorb(Block *block, Block *after) {
        block->size += after->size;
        block->next = after->next;
        if (block->next) {
            block->next->previous = block;
        }
        merge_accesses(block->accesses, after->accesses);
        delete after;
    }

    [[noreturn]] void refuse(size_t size, size_t bytes) {
        stats.num_ooms++;
        int64_t allocated = stats.allocated_bytes[0].current;
        c10::reportOutOfMemoryToProfiler(signed_of(size), static_cast<size_t>(allocated), reserved,
                                         device_at(index));
        TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", bytes,
                         " bytes. Device ", index, " has ", capacity, " bytes, of which ",
                         reserved, " are reserved and ", allocated, " allocated by PyTorch.");
    }
};

}  // namespace
}  // namespace sim
