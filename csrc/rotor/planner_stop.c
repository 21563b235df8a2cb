#include "planner_stop.h"

#include "probe.h"

#define WORK_PER_LOOK 100000

int rotor_stop_look(rotor_stop_t *self, int64_t work) {
    self->until_next -= work;
    self->worked += work;
    if (self->most_work > 0 && self->worked > self->most_work) {
        self->is_over = true;
    }
    if (self->until_next > 0) {
        return ROTOR_OK;
    }
    self->until_next = WORK_PER_LOOK;
    if (self->deadline_ns != 0 && rotor_clock_ns() >= self->deadline_ns) {
        self->is_over = true;
    }
    return rotor_ask(self->callback, rotor_min(self->done, self->total), self->total);
}
