// What libraries of kernels take at a first call: workspaces of handles, searches, scratch.
//
// As on a GPU, a handle belongs to a thread and a stream, and its workspace is kept; the search for
// an algorithm belongs to a thread and the shapes, and its workspace is freed after it.
#include "sim.h"

#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

namespace sim {

namespace {

using Key = std::tuple<std::thread::id, int, int>;
using Shapes = std::vector<std::vector<int64_t>>;

std::mutex &guard = *new std::mutex;
auto &workspaces = *new std::map<Key, c10::DataPtr>;
auto &searched = *new std::set<std::tuple<std::thread::id, int, std::string, Shapes>>;
auto &called = *new std::set<std::pair<int, std::string>>;
size_t handle_bytes = 0, search_bytes = 0, first_bytes = 0;
int64_t handles = 0, searches = 0, first_calls = 0;

bool is_one_of(const char *operation, std::initializer_list<const char *> names) {
    for (const char *name : names) {
        if (!std::strcmp(operation, name)) {
            return true;
        }
    }
    return false;
}

template <class Set, class Key>
bool is_first(Set &set, Key key, int64_t &count) {
    std::lock_guard<std::mutex> lock(guard);
    bool first = set.insert(std::move(key)).second;
    count += first ? 1 : 0;
    return first;
}

}  // namespace

void prepare_kernel(const char *operation, int device, int stream, const Shapes &shapes) {
    auto thread = std::this_thread::get_id();
    bool multiplies = is_one_of(operation, {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm",
                                            "aten::mv", "aten::addmv", "aten::dot"});
    if (multiplies && handle_bytes > 0) {
        Key key{thread, device, stream};
        bool missing;
        {
            std::lock_guard<std::mutex> lock(guard);
            missing = !workspaces.count(key);
        }
        if (missing) {
            c10::DataPtr memory = allocate(handle_bytes, device, device_at(device));
            std::lock_guard<std::mutex> lock(guard);
            workspaces[key] = std::move(memory);
            handles++;
        }
    }
    bool convolves = is_one_of(operation, {"aten::convolution", "aten::convolution_backward"});
    if (convolves && search_bytes > 0 &&
        is_first(searched, std::tuple(thread, device, std::string(operation), shapes), searches)) {
        c10::DataPtr memory = allocate(search_bytes, device, device_at(device));
    }
    if (first_bytes > 0 && is_first(called, std::pair(device, std::string(operation)), first_calls)) {
        c10::DataPtr memory = allocate(first_bytes, device, device_at(device));
    }
}

}  // namespace sim

SIM_EXPORT void sim_set_handles(uint64_t handle_bytes, uint64_t search_bytes, uint64_t first_bytes) {
    sim::handle_bytes = handle_bytes;
    sim::search_bytes = search_bytes;
    sim::first_bytes = first_bytes;
}

SIM_EXPORT int64_t sim_handles() { return sim::handles; }
SIM_EXPORT int64_t sim_searches() { return sim::searches; }
SIM_EXPORT int64_t sim_first_calls() { return sim::first_calls; }

// As in a fresh process: every thread is to make its handles and searches again.
SIM_EXPORT void sim_forget_handles() {
    std::map<sim::Key, c10::DataPtr> dead;
    std::lock_guard<std::mutex> lock(sim::guard);
    dead.swap(sim::workspaces);
    sim::searched.clear();
    sim::called.clear();
    sim::handles = sim::searches = sim::first_calls = 0;
}
