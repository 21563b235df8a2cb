/* Orders of the operations that the planner walks along. */
#ifndef ROTOR_PLANNER_ORDER_H
#define ROTOR_PLANNER_ORDER_H

#include "dataflow.h"

/*
 * The order of the graph with those operations of the backward at its end, in their order, that make
 * nothing but pinned storages which nothing reads (gradients of weights), and that read less than
 * `share` times the bytes that they make. False where no operation is deferred.
 */
bool rotor_order_defer(const rotor_dataflow_t *graph, double share, int32_t *order);

#endif
