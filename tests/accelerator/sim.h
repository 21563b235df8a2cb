// A simulated accelerator for tests: what its parts ask of each other.
//
// Kernels of the CPU run on the device's memory, which a caching allocator gives out. They run as
// soon as they are launched; copies over the link run as late as synchronisation permits, and
// accesses of one block from two streams are checked for an order between them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <vector>

#define SIM_EXPORT extern "C" __attribute__((visibility("default")))

namespace sim {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 4;
constexpr int kStreams = 17;  // Of each device; 0 is the default stream.
constexpr int kLanes = kDevices * kStreams;

inline c10::Device device_at(int index) {
    return c10::Device(kType, static_cast<c10::DeviceIndex>(index));
}

// ---- The current device and stream of a thread (streams.cpp) -----------------------------------
int device_count();
int current_device();
int exchange_device(int index);
int current_stream(int device);
int exchange_stream(int device, int stream);
int new_stream(int device);

class OnDevice {
  public:
    explicit OnDevice(int index) : before_(exchange_device(index)) {}
    ~OnDevice() { exchange_device(before_); }
    OnDevice(const OnDevice &) = delete;

  private:
    int before_;
};

// ---- Time and order (streams.cpp) ----------------------------------------------------------------
// The number of the last piece of work of every lane (device and stream) that is known to be done.
using Seen = std::array<uint64_t, kLanes>;

struct Moment {  // An event: a place in a stream.
    int device = 0, stream = 0;
    uint64_t jobs = 0;    // Jobs queued before it.
    int64_t at_ns = 0;    // Time at which the stream reaches it.
    Seen seen{};
    bool recorded = false;
};

struct Access {  // The last one of its kind from a lane.
    int lane;
    uint64_t number;
    bool writes;
};

enum class Direction { to_device = 0, to_host = 1 };

int64_t wall_ns();
int64_t host_ns();  // By the chosen clock.
void launch(int device, int stream);
void catch_up(int device, int stream);  // Does what is queued there now.
void occupy(int device, int stream, int64_t busy_ns);
void finish(int device, int stream, int64_t began_ns, size_t bytes);
void transfer(int device, int stream, Direction direction, void *to, const void *from,
              size_t bytes, c10::Storage host, bool waits);
Moment moment_now(int device, int stream);
bool has_passed(const Moment &moment);
void wait_on_host(const Moment &moment);
void wait_on_stream(const Moment &moment, int device, int stream);
bool stream_is_idle(int device, int stream);
double elapsed_ms(const Moment &begin, const Moment &end);
void synchronize_stream(int device, int stream);
void synchronize_device(int device);
void check_order(std::vector<Access> &accesses, int device, int stream, bool writes,
                 const char *operation);
void merge_accesses(std::vector<Access> &into, const std::vector<Access> &from);

// ---- The caching allocator (cache.cpp) -----------------------------------------------------------
struct Block {
    int device = 0, stream = 0;
    int owner = 0;  // The private pool of its segment; 0: the common one.
    bool small = false;
    char *address = nullptr;
    size_t size = 0, requested = 0;
    bool allocated = false;
    bool expandable = false;  // Part of a range that grows,
    bool mapped = true;       // and false where it has no memory.
    int waits = 0;  // Events that have to pass before it may be reused.
    std::set<int> other_streams;
    Block *previous = nullptr, *next = nullptr;
    std::vector<Access> accesses;
};

c10::DataPtr allocate(size_t bytes, int device, c10::Device label);
void deallocate(void *address);
bool is_allocated(void *address);
void used_on_stream(const c10::DataPtr &data, int stream);
void note_access(const c10::DataPtr &data, int device, int stream, bool writes,
                 const char *operation);
void release_cached(int device);
int device_of(const void *address);  // -1: of none.
std::pair<size_t, size_t> free_and_total(int device);
c10::CachingDeviceAllocator::DeviceStats statistics(int device);
void reset_peaks(int device);
void reset_accumulated(int device);

// ---- Allocators as PyTorch sees them (memory.cpp) ------------------------------------------------
class InKernel {  // The CPU's allocator gives memory of the device in this scope.
  public:
    explicit InKernel(int device);
    ~InKernel();
    InKernel(const InKernel &) = delete;

  private:
    int before_;
};

c10::DeviceAllocator *device_allocator();
c10::Allocator *cpu_allocator();
c10::Allocator *pinned_allocator();
bool is_pinned(const void *address);
void install_cpu_allocator();

// ---- Generators (device.cpp) ---------------------------------------------------------------------
const at::Generator &default_generator(int device);
at::Generator inner_generator(const at::Generator &generator);

// ---- What a kernel takes at its first call (handles.cpp) -----------------------------------------
void prepare_kernel(const char *operation, int device, int stream,
                    const std::vector<std::vector<int64_t>> &shapes);

}  // namespace sim
