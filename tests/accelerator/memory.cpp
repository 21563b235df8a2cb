// Allocators as PyTorch sees them: the device's, the CPU's within kernels, and pinned memory.
#include "sim.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace sim {

namespace {

class Device final : public c10::DeviceAllocator {
  public:
    c10::DataPtr allocate(size_t bytes) override {
        int index = current_device();
        return sim::allocate(bytes, index, device_at(index));
    }
    c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }
    void copy_data(void *to, const void *from, size_t bytes) const override {
        std::memcpy(to, from, bytes);
    }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {
        for (int i = 0; i < device_count(); i++) {
            release_cached(i);
        }
    }
    void recordStream(const c10::DataPtr &data, c10::Stream stream) override {
        used_on_stream(data, static_cast<int>(stream.id()));
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
        return statistics(index);
    }
    void resetAccumulatedStats(c10::DeviceIndex index) override { reset_accumulated(index); }
    void resetPeakStats(c10::DeviceIndex index) override { reset_peaks(index); }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
        return free_and_total(index);
    }
};
Device &the_device = *new Device;

thread_local int kernel_device = -1;

// Results and workspaces of a kernel that runs for a device are memory of the device.
class Host final : public c10::Allocator {
  public:
    c10::Allocator *usual = nullptr;

    c10::DataPtr allocate(size_t bytes) override {
        if (kernel_device < 0) {
            return usual->allocate(bytes);
        }
        return sim::allocate(bytes, kernel_device, c10::Device(c10::kCPU));
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_either; }
    void copy_data(void *to, const void *from, size_t bytes) const override {
        std::memcpy(to, from, bytes);
    }

  private:
    static void free_either(void *address);
};
Host &the_host = *new Host;

void Host::free_either(void *address) {
    if (is_allocated(address)) {
        deallocate(address);
    } else {
        the_host.usual->raw_deleter()(address);
    }
}

std::mutex &pinned_guard = *new std::mutex;
auto &pinned_sizes = *new std::map<const char *, size_t>;

void free_pinned(void *address) {
    {
        std::lock_guard<std::mutex> lock(pinned_guard);
        pinned_sizes.erase(static_cast<const char *>(address));
    }
    std::free(address);
}

class Pinned final : public at::HostAllocator {
  public:
    c10::DataPtr allocate(size_t bytes) override {
        void *address = nullptr;
        if (bytes > 0) {
            TORCH_CHECK(!posix_memalign(&address, 4096, bytes), "no memory to pin");
            std::lock_guard<std::mutex> lock(pinned_guard);
            pinned_sizes[static_cast<const char *>(address)] = bytes;
        }
        return {address, address, &free_pinned, c10::Device(c10::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
    void copy_data(void *to, const void *from, size_t bytes) const override {
        std::memcpy(to, from, bytes);
    }
    bool record_event(void *, void *, c10::Stream) override { return true; }
    void empty_cache() override {}
    at::HostStats get_stats() override { return {}; }
    void reset_accumulated_stats() override {}
    void reset_peak_stats() override {}
};
Pinned &the_pinned = *new Pinned;

}  // namespace

InKernel::InKernel(int device) : before_(kernel_device) { kernel_device = device; }
InKernel::~InKernel() { kernel_device = before_; }

c10::DeviceAllocator *device_allocator() { return &the_device; }
c10::Allocator *cpu_allocator() { return &the_host; }
c10::Allocator *pinned_allocator() { return &the_pinned; }

bool is_pinned(const void *address) {
    auto *place = static_cast<const char *>(address);
    std::lock_guard<std::mutex> lock(pinned_guard);
    auto at = pinned_sizes.upper_bound(place);
    return at != pinned_sizes.begin() && (--at, place < at->first + at->second);
}

void install_cpu_allocator() {
    if (!the_host.usual) {
        the_host.usual = c10::GetCPUAllocator();
        c10::SetCPUAllocator(&the_host);
    }
}

REGISTER_ALLOCATOR(kType, &the_device)
REGISTER_HOST_ALLOCATOR(kType, &the_pinned)

}  // namespace sim
