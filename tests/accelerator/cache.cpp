// Allocations and frees of tensors, by the caching allocator of each device.
#include "cache.h"

#include <mutex>
#include <sstream>
#include <unordered_map>
#include <utility>

namespace sim {
namespace {

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

// The private pool of this thread's allocations on each device; 0: none.
thread_local int used_pools[kDevices] = {};
int last_pool = 0;

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
    Block *block = caches[device].take(bytes, {used_pools[device], stream});
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
    size_t used = cache.reserved + cache.taken;
    return {cache.capacity > used ? cache.capacity - used : 0, cache.capacity};
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

SIM_EXPORT void sim_set_taken(int device, uint64_t bytes) {
    sim::Guarded lock(sim::guard);
    sim::caches[device].taken = bytes;
}

SIM_EXPORT void sim_set_fraction(int device, double fraction) {
    sim::Guarded lock(sim::guard);
    sim::caches[device].fraction = fraction;
}

// Lets the memory of a device grow in ranges; what is cached of the other kind goes first.
SIM_EXPORT void sim_set_expandable(int device, int on) {
    sim::release_cached(device);
    sim::Guarded lock(sim::guard);
    sim::caches[device].drop_empty_ranges();
    sim::caches[device].expandable = on != 0;
}

SIM_EXPORT int sim_new_pool(int device) {
    sim::Guarded lock(sim::guard);
    sim::caches[device].private_pools.insert(++sim::last_pool);
    return sim::last_pool;
}

// Lets the memory of a pool be given back, as soon as nothing is allocated in it.
SIM_EXPORT void sim_drop_pool(int device, int pool) {
    sim::Guarded lock(sim::guard);
    sim::caches[device].private_pools.erase(pool);
}

// Takes the allocations of this thread from a pool; returns the one before.
SIM_EXPORT int sim_use_pool(int device, int pool) {
    return std::exchange(sim::used_pools[device], pool);
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
            << ", \"stream\": " << first->stream << ", \"segment_pool_id\": [0, "
            << first->owner << "], \"segment_type\": \""
            << (first->small ? "small" : "large") << "\", \"blocks\": [";
        size_t total = 0, allocated = 0;
        const char *between = "";
        for (auto *block = first; block; block = block->next) {
            if (!block->mapped) {
                continue;
            }
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

// Replays allocations and frees in the encoding of csrc/rotor/blocks.h, on the current stream, and
// writes the allocated and reserved bytes after each; all is freed at the end.
SIM_EXPORT void sim_replay(int device, const int64_t *events, int64_t length, int64_t *levels) {
    std::vector<c10::DataPtr> made;
    for (int64_t k = 0; k < length; k++) {
        if (events[k] == INT64_MIN) {
            sim::release_cached(device);
        } else if (events[k] < 0) {
            made.at(static_cast<size_t>(-1 - events[k])).clear();
        } else {
            made.emplace_back();
            try {
                made.back() = sim::allocate(static_cast<size_t>(events[k]), device,
                                            sim::device_at(device));
            } catch (const c10::OutOfMemoryError &) {
            }
        }
        levels[2 * k] = sim::caches[device].stats.allocated_bytes[0].current;
        levels[2 * k + 1] = static_cast<int64_t>(sim::caches[device].reserved);
    }
}
