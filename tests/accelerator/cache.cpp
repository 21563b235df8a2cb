// The caching allocator: the rules of PyTorch's native one for CUDA.
#include "sim.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_map>

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
bool leaves_rest(size_t rest, bool small) { return small ? rest >= kUnit : rest > kMiB; }

struct BestFit {
    bool operator()(const Block *a, const Block *b) const {
        return std::make_tuple(a->stream, a->size, reinterpret_cast<uintptr_t>(a->address)) <
               std::make_tuple(b->stream, b->size, reinterpret_cast<uintptr_t>(b->address));
    }
};
using Pool = std::set<Block *, BestFit>;

struct Waiting {
    Moment moment;
    Block *block;
};

class Cache {
  public:
    int index = 0;
    size_t capacity = 256 * kMiB;
    double fraction = 1.0;
    size_t reserved = 0;
    DeviceStats stats;
    std::map<char *, Block *> segments;  // The first block of each by its address.

    Block *take(size_t bytes, int stream) {
        harvest(false);
        size_t size = block_size(bytes);
        bool small = size <= kLargestSmall;
        Block *block = best_free(size, stream, small);
        if (!block) {
            block = new_segment(segment_size(size), stream, small);
        }
        if (!block) {
            stats.num_alloc_retries++;
            synchronize_device(index);
            release();
            block = new_segment(segment_size(size), stream, small);
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
            for (auto at = pool->begin(); at != pool->end();) {
                Block *block = *at;
                if (block->previous || block->next) {
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
        }
    }

    bool poisons = false;

  private:
    Pool small_, large_;
    std::deque<Waiting> waiting_;

    static int64_t signed_of(size_t bytes) { return static_cast<int64_t>(bytes); }

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

    Block *best_free(size_t size, int stream, bool small) {
        Block wanted;
        wanted.stream = stream;
        wanted.size = size;
        Pool &free_blocks = pool(small);
        auto at = free_blocks.lower_bound(&wanted);
        if (at == free_blocks.end() || (*at)->stream != stream) {
            return nullptr;
        }
        Block *block = *at;
        free_blocks.erase(at);
        count_split(block, -1);
        return block;
    }

    Block *new_segment(size_t size, int stream, bool small) {
        double allowed = static_cast<double>(capacity) * fraction;
        if (static_cast<double>(reserved + size) > allowed) {
            return nullptr;
        }
        void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                            -1, 0);
        if (memory == MAP_FAILED) {
            return nullptr;
        }
        auto *block = new Block;
        block->device = index;
        block->stream = stream;
        block->small = small;
        block->address = static_cast<char *>(memory);
        block->size = size;
        segments[block->address] = block;
        reserved += size;
        count(small, stats.segment, 1);
        count(small, stats.reserved_bytes, signed_of(size));
        stats.num_device_alloc++;
        return block;
    }

    void split(Block *block, size_t size) {
        size_t rest = block->size - size;
        if (!leaves_rest(rest, block->small)) {
            return;
        }
        auto *remainder = new Block(*block);
        remainder->address = block->address + size;
        remainder->size = rest;
        remainder->requested = 0;
        remainder->previous = block;
        if (block->next) {
            block->next->previous = remainder;
        }
        block->next = remainder;
        block->size = size;
        pool(block->small).insert(remainder);
        count_split(remainder, 1);
    }

    void make_free(Block *block) {
        count(block->small, stats.active, -1);
        count(block->small, stats.active_bytes, -signed_of(block->size));
        if (poisons) {
            std::memset(block->address, 0xFF, block->size);
        }
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
    }

    static bool is_free(const Block *block) {
        return block && !block->allocated && !block->waits;
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

// Tensors may die after the statics of a library: these are never destroyed.
std::recursive_mutex &guard = *new std::recursive_mutex;
using Guarded = std::lock_guard<std::recursive_mutex>;
auto &blocks = *new std::unordered_map<void *, Block *>;  // Allocated ones by their addresses.

Cache *make_caches() {
    auto *caches = new Cache[kDevices];
    for (int i = 0; i < kDevices; i++) {
        caches[i].index = i;
    }
    return caches;
}
Cache *const caches = make_caches();

void report(Cache &cache, void *address, int64_t bytes) {
    if (c10::memoryProfilingEnabled()) {
        auto allocated = static_cast<size_t>(cache.stats.allocated_bytes[0].current);
        c10::reportMemoryUsageToProfiler(address, bytes, allocated, cache.reserved,
                                         device_at(cache.index));
    }
}

}  // namespace

// The context of memory is its address: PyTorch's raw_allocate() insists on it.
c10::DataPtr allocate(size_t bytes, int device, c10::Device label) {
    if (bytes == 0) {
        return {nullptr, nullptr, &deallocate, label};
    }
    int stream = current_stream(device);
    Guarded lock(guard);
    Block *block = caches[device].take(bytes, stream);
    blocks[block->address] = block;
    report(caches[device], block->address, static_cast<int64_t>(block->size));
    return {block->address, block->address, &deallocate, label};
}

void deallocate(void *address) {
    if (!address) {
        return;
    }
    Guarded lock(guard);
    auto at = blocks.find(address);
    TORCH_INTERNAL_ASSERT(at != blocks.end(), "sim: memory is freed that is not allocated");
    Block *block = at->second;
    blocks.erase(at);
    Cache &cache = caches[block->device];
    auto size = static_cast<int64_t>(block->size);
    cache.give(block);
    report(cache, address, -size);
}

bool is_allocated(void *address) {
    Guarded lock(guard);
    return blocks.count(address) > 0;
}

void used_on_stream(const c10::DataPtr &data, int stream) {
    Guarded lock(guard);
    auto at = blocks.find(data.get_context());
    if (at != blocks.end() && at->second->stream != stream) {
        at->second->other_streams.insert(stream);
    }
}

void note_access(const c10::DataPtr &data, int device, int stream, bool writes,
                 const char *operation) {
    Guarded lock(guard);
    auto at = blocks.find(data.get_context());
    if (at != blocks.end()) {
        check_order(at->second->accesses, device, stream, writes, operation);
    }
}

void release_cached(int device) {
    synchronize_device(device);
    Guarded lock(guard);
    caches[device].release();
}

int device_of(const void *address) {
    Guarded lock(guard);
    auto *place = static_cast<char *>(const_cast<void *>(address));
    for (int i = 0; i < kDevices; i++) {
        auto at = caches[i].segments.upper_bound(place);
        if (at == caches[i].segments.begin()) {
            continue;
        }
        --at;
        size_t size = 0;
        for (Block *block = at->second; block; block = block->next) {
            size += block->size;
        }
        if (place < at->first + size) {
            return i;
        }
    }
    return -1;
}

std::pair<size_t, size_t> free_and_total(int device) {
    Guarded lock(guard);
    Cache &cache = caches[device];
    return {cache.capacity > cache.reserved ? cache.capacity - cache.reserved : 0, cache.capacity};
}

DeviceStats statistics(int device) {
    Guarded lock(guard);
    return caches[device].stats;
}

namespace {
void for_each_stat(DeviceStats &stats, void (Stat::*change)()) {
    for (StatArray *figures :
         {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split,
          &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
          &stats.inactive_split_bytes, &stats.requested_bytes}) {
        for (Stat &stat : *figures) {
            (stat.*change)();
        }
    }
}
}  // namespace

void reset_peaks(int device) {
    Guarded lock(guard);
    for_each_stat(caches[device].stats, &Stat::reset_peak);
}

void reset_accumulated(int device) {
    Guarded lock(guard);
    DeviceStats &stats = caches[device].stats;
    for_each_stat(stats, &Stat::reset_accumulated);
    stats.num_alloc_retries = stats.num_ooms = stats.num_device_alloc = stats.num_device_free = 0;
}

}  // namespace sim

SIM_EXPORT void sim_set_capacity(int device, uint64_t bytes) {
    sim::Guarded lock(sim::guard);
    sim::caches[device].capacity = bytes;
}

SIM_EXPORT void sim_set_fraction(int device, double fraction) {
    sim::Guarded lock(sim::guard);
    sim::caches[device].fraction = fraction;
}

SIM_EXPORT double sim_fraction(int device) { return sim::caches[device].fraction; }

SIM_EXPORT void sim_set_poison(int on) {
    for (int i = 0; i < sim::kDevices; i++) {
        sim::caches[i].poisons = on != 0;
    }
}

// Segments and their blocks as JSON, in the words of torch.cuda.memory_snapshot().
SIM_EXPORT const char *sim_snapshot(int device) {
    static std::string &text = *new std::string;
    sim::Guarded lock(sim::guard);
    std::ostringstream out;
    const char *comma = "";
    out << '[';
    for (auto &[address, first] : sim::caches[device].segments) {
        out << comma << "{\"address\": " << reinterpret_cast<uintptr_t>(address)
            << ", \"stream\": " << first->stream << ", \"segment_type\": \""
            << (first->small ? "small" : "large") << "\", \"blocks\": [";
        size_t total = 0, allocated = 0;
        const char *between = "";
        for (auto *block = first; block; block = block->next) {
            total += block->size;
            allocated += block->allocated ? block->size : 0;
            const char *state = block->allocated ? "active_allocated"
                                : block->waits   ? "active_pending_free"
                                                 : "inactive";
            out << between << "{\"address\": " << reinterpret_cast<uintptr_t>(block->address)
                << ", \"size\": " << block->size << ", \"requested_size\": " << block->requested
                << ", \"state\": \"" << state << "\"}";
            between = ", ";
        }
        out << "], \"total_size\": " << total << ", \"allocated_size\": " << allocated << '}';
        comma = ", ";
    }
    out << ']';
    text = out.str();
    return text.c_str();
}
