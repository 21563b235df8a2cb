// Devices and streams of threads, time, late copies, and the order of accesses.
#include "sim.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <deque>
#include <mutex>
#include <string>
#include <utility>

namespace sim {

namespace {

enum Clock { real = 0, virtual_time = 1, model = 2 };

struct Job {  // A copy, or the wait for another stream.
    std::function<void()> run;
    c10::Storage host;
};

struct Stream {
    int64_t ends_ns = 0;  // Of the last work.
    uint64_t queued = 0, done = 0, number = 0;
    std::deque<Job> jobs;  // From done to queued.
    Seen seen{};
};

struct State {
    Stream streams[kStreams];
    int64_t link_ns[2] = {0, 0};  // Until then the link is busy, by direction.
    Seen host_seen{};
    int next = 0;
};

std::recursive_mutex &guard = *new std::recursive_mutex;
using Guarded = std::lock_guard<std::recursive_mutex>;
State *const states = new State[kDevices];
int devices = 1;
thread_local int the_device = 0;
thread_local int the_streams[kDevices] = {};

int clock_kind = real;
int64_t shift_ns = 0, model_ns = 0;
int64_t launch_ns = 5000, latency_ns = 10000, kernel_ns = 2000;
double link_bytes_per_ns = 8.0, memory_bytes_per_ns = 100.0, slowdown = 1.0;
bool copies_are_late = true, is_duplex = true;
int64_t kernels = 0, races = 0;
std::string &last_race = *new std::string;

Stream &stream_at(int device, int stream) { return states[device].streams[stream]; }
int lane_of(int device, int stream) { return device * kStreams + stream; }

void join(Seen &into, const Seen &from) {
    for (size_t i = 0; i < into.size(); i++) {
        into[i] = std::max(into[i], from[i]);
    }
}

void wait_until(int64_t time_ns) {
    int64_t left = time_ns - host_ns();
    if (left <= 0) {
        return;
    }
    if (clock_kind == model) {
        model_ns += left;
    } else if (clock_kind == virtual_time) {
        shift_ns += left;
    } else {
        timespec pause{left / 1000000000, left % 1000000000};
        nanosleep(&pause, nullptr);
    }
}

// The tensors of jobs that ran die after the lock is given up: memory has its own.
class Locked {
  public:
    void run(int device, int stream, uint64_t upto) {
        Stream &queue = stream_at(device, stream);
        while (queue.done < upto && !queue.jobs.empty()) {
            Job job = std::move(queue.jobs.front());
            queue.jobs.pop_front();
            queue.done++;
            job.run();
            dead_.push_back(std::move(job.host));
        }
    }
    void run_all(int device, int stream) {
        run(device, stream, stream_at(device, stream).queued);
    }

  private:
    std::vector<c10::Storage> dead_;  // Destroyed after the lock, which is declared later.
    Guarded lock_{guard};
};

// Where a wait of one stream runs jobs of another, the outermost lock keeps what dies.
thread_local Locked *outermost = nullptr;
class Outermost {
  public:
    explicit Outermost(Locked *locked) : before_(outermost) { outermost = locked; }
    ~Outermost() { outermost = before_; }

  private:
    Locked *before_;
};

void begin_work(int device, int stream) {
    Stream &queue = stream_at(device, stream);
    queue.number++;
    queue.seen[static_cast<size_t>(lane_of(device, stream))] = queue.number;
    join(queue.seen, states[device].host_seen);
    if (clock_kind == model) {
        model_ns += launch_ns;
    }
}

}  // namespace

int device_count() { return devices; }
int current_device() { return the_device; }
int exchange_device(int index) {
    TORCH_CHECK(index >= 0 && index < devices, "sim has ", devices, " devices, not number ", index);
    return std::exchange(the_device, index);
}
int current_stream(int device) { return the_streams[device]; }
int exchange_stream(int device, int stream) { return std::exchange(the_streams[device], stream); }
int new_stream(int device) {
    Guarded lock(guard);
    return 1 + states[device].next++ % (kStreams - 1);
}

int64_t wall_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

int64_t host_ns() {
    if (clock_kind == model) {
        return model_ns;
    }
    return wall_ns() + (clock_kind == virtual_time ? shift_ns : 0);
}

void launch(int device, int stream) {
    Locked locked;
    Outermost keep(&locked);
    locked.run_all(device, stream);
    begin_work(device, stream);
}

void catch_up(int device, int stream) {
    Locked locked;
    Outermost keep(&locked);
    locked.run_all(device, stream);
}

void finish(int device, int stream, int64_t began_ns, size_t bytes) {
    Guarded lock(guard);
    Stream &queue = stream_at(device, stream);
    int64_t took_ns = wall_ns() - began_ns;
    kernels++;
    if (clock_kind == model) {
        if (bytes == 0) {
            return;
        }
        double moved_ns = static_cast<double>(bytes) / memory_bytes_per_ns;
        queue.ends_ns = std::max(queue.ends_ns, model_ns) + kernel_ns + static_cast<int64_t>(moved_ns);
        return;
    }
    int64_t shift = clock_kind == virtual_time ? shift_ns : 0;
    int64_t start_ns = std::max(queue.ends_ns, began_ns + shift);
    queue.ends_ns = start_ns + static_cast<int64_t>(static_cast<double>(took_ns) * slowdown);
    if (clock_kind == virtual_time) {
        shift_ns -= took_ns;  // The host goes on at once.
    }
}

void occupy(int device, int stream, int64_t busy_ns) {
    Locked locked;
    Outermost keep(&locked);
    locked.run_all(device, stream);
    begin_work(device, stream);
    Stream &queue = stream_at(device, stream);
    queue.ends_ns = std::max(queue.ends_ns, host_ns()) + busy_ns;
}

void transfer(int device, int stream, Direction direction, void *to, const void *from,
              size_t bytes, c10::Storage host, bool waits) {
    Locked locked;
    Outermost keep(&locked);
    State &state = states[device];
    Stream &queue = stream_at(device, stream);
    begin_work(device, stream);
    int64_t &link = state.link_ns[is_duplex ? static_cast<int>(direction) : 0];
    double moved_ns = static_cast<double>(bytes) / link_bytes_per_ns;
    link = std::max({queue.ends_ns, link, host_ns()}) + latency_ns + static_cast<int64_t>(moved_ns);
    queue.ends_ns = link;
    queue.queued++;
    queue.jobs.push_back({[=] { std::memcpy(to, from, bytes); }, std::move(host)});
    if (waits || !copies_are_late) {
        locked.run_all(device, stream);
    }
    if (waits) {
        wait_until(queue.ends_ns);
        join(state.host_seen, queue.seen);
    }
}

Moment moment_now(int device, int stream) {
    Guarded lock(guard);
    Stream &queue = stream_at(device, stream);
    return {device, stream, queue.queued, std::max(queue.ends_ns, host_ns()), queue.seen, true};
}

bool has_passed(const Moment &moment) {
    if (!moment.recorded) {
        return true;
    }
    Locked locked;
    Outermost keep(&locked);
    if (host_ns() < moment.at_ns) {
        return false;
    }
    locked.run(moment.device, moment.stream, moment.jobs);
    join(states[moment.device].host_seen, moment.seen);
    return true;
}

void wait_on_host(const Moment &moment) {
    if (!moment.recorded) {
        return;
    }
    Locked locked;
    Outermost keep(&locked);
    locked.run(moment.device, moment.stream, moment.jobs);
    wait_until(moment.at_ns);
    join(states[moment.device].host_seen, moment.seen);
}

void wait_on_stream(const Moment &moment, int device, int stream) {
    if (!moment.recorded) {
        return;
    }
    Guarded lock(guard);
    Stream &queue = stream_at(device, stream);
    queue.ends_ns = std::max(queue.ends_ns, moment.at_ns);
    join(queue.seen, moment.seen);
    queue.queued++;
    auto run = [other = moment.device, lane = moment.stream, upto = moment.jobs] {
        outermost->run(other, lane, upto);
    };
    queue.jobs.push_back({run, c10::Storage()});
}

bool stream_is_idle(int device, int stream) {
    return has_passed(moment_now(device, stream));
}

double elapsed_ms(const Moment &begin, const Moment &end) {
    TORCH_CHECK(begin.recorded && end.recorded, "both events have to be recorded first");
    return static_cast<double>(end.at_ns - begin.at_ns) / 1e6;
}

void synchronize_stream(int device, int stream) {
    Locked locked;
    Outermost keep(&locked);
    Stream &queue = stream_at(device, stream);
    locked.run_all(device, stream);
    wait_until(queue.ends_ns);
    join(states[device].host_seen, queue.seen);
}

void synchronize_device(int device) {
    for (int stream = 0; stream < kStreams; stream++) {
        synchronize_stream(device, stream);
    }
}

// Two accesses of one block, one of them a write, need an order that the second stream waited for.
void check_order(std::vector<Access> &accesses, int device, int stream, bool writes,
                 const char *operation) {
    Guarded lock(guard);
    Stream &queue = stream_at(device, stream);
    int lane = lane_of(device, stream);
    std::vector<Access> kept;
    for (const Access &past : accesses) {
        bool conflicts = past.lane != lane && (past.writes || writes);
        if (conflicts && queue.seen[static_cast<size_t>(past.lane)] < past.number) {
            races++;
            last_race = std::string(operation) + (writes ? " writes" : " reads") + " on stream " +
                        std::to_string(stream) + " what stream " +
                        std::to_string(past.lane % kStreams) +
                        (past.writes ? " writes" : " reads");
        }
        bool is_covered = writes || (past.lane == lane && !past.writes);
        if (!is_covered) {
            kept.push_back(past);
        }
    }
    kept.push_back({lane, queue.number, writes});
    accesses = std::move(kept);
}

void merge_accesses(std::vector<Access> &into, const std::vector<Access> &from) {
    for (const Access &access : from) {
        auto same = [&](const Access &other) {
            return other.lane == access.lane && other.writes == access.writes;
        };
        auto at = std::find_if(into.begin(), into.end(), same);
        if (at == into.end()) {
            into.push_back(access);
        } else {
            at->number = std::max(at->number, access.number);
        }
    }
}

}  // namespace sim

SIM_EXPORT void sim_set_devices(int count) { sim::devices = count; }

SIM_EXPORT void sim_set_clock(int kind) {
    sim::Guarded lock(sim::guard);
    sim::clock_kind = kind;
    sim::shift_ns = sim::model_ns = 0;
    for (int i = 0; i < sim::kDevices; i++) {
        for (auto &stream : sim::states[i].streams) {
            stream.ends_ns = 0;
        }
        sim::states[i].link_ns[0] = sim::states[i].link_ns[1] = 0;
    }
}

SIM_EXPORT void sim_set_link(double bytes_per_ns, int64_t latency_ns, int is_duplex) {
    sim::link_bytes_per_ns = bytes_per_ns;
    sim::latency_ns = latency_ns;
    sim::is_duplex = is_duplex != 0;
}

SIM_EXPORT void sim_set_compute(double slowdown, double bytes_per_ns, int64_t launch_ns) {
    sim::slowdown = slowdown;
    sim::memory_bytes_per_ns = bytes_per_ns;
    sim::launch_ns = launch_ns;
}

// A kernel that does nothing for a while: two cycles take a nanosecond.
SIM_EXPORT void sim_sleep(int64_t cycles) {
    int device = sim::current_device();
    sim::occupy(device, sim::current_stream(device), cycles / 2);
}

SIM_EXPORT void sim_set_late_copies(int on) { sim::copies_are_late = on != 0; }
SIM_EXPORT int64_t sim_clock_ns() { return sim::host_ns(); }
SIM_EXPORT int64_t sim_kernels() { return sim::kernels; }
SIM_EXPORT int64_t sim_races() { return sim::races; }
SIM_EXPORT const char *sim_last_race() { return sim::last_race.c_str(); }
