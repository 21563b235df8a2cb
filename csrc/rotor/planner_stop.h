/* The end of the planner's work: a callback, a time limit, a bound on the work. */
#ifndef ROTOR_PLANNER_STOP_H
#define ROTOR_PLANNER_STOP_H

#include "core.h"

/* When to stop: asks the callback and the clock once in a while. */
typedef struct {
    /* input */
    const rotor_callback_t *callback;
    int64_t deadline_ns; /* 0: none */
    int64_t done; /* at most the total is told */
    int64_t total;
    int64_t step; /* added to `done` by one walk or move */
    /* state */
    int64_t until_next; /* units of work before the next look */
    int64_t worked;
    int64_t most_work; /* 0: any */
    bool is_over;      /* the time limit has passed, or the work is done */
} rotor_stop_t;

/* Counts `work` elementary steps. ROTOR_ERR_INTERRUPTED when the callback says stop; sets is_over. */
int rotor_stop_look(rotor_stop_t *self, int64_t work);

#endif
