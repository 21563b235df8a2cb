/*
 * The planner with a second tier: storages are kept, made again, or moved, as is fastest within a budget.
 *
 * The program without the tier is found first, so that the answer is never slower. The joint search begins
 * from it, from one for a larger budget, from the plain order, which the tier brings within the budget, and
 * from the best greedy walks with the tier. rotor_program_simulate alone decides.
 */
#ifndef ROTOR_PLANNER_JOINT_H
#define ROTOR_PLANNER_JOINT_H

#include "planner.h"

/*
 * As rotor_planner_plan(), with a link; the start may use it. ROTOR_ERR_INFEASIBLE when no program is
 * found, by either way, which follows from bytes alone: `program` is then the one of the least peak of
 * both, and *minimum that peak. ROTOR_ERR_BAD_OPERATION for a graph that is not plain.
 */
int rotor_joint_plan(const rotor_dataflow_t *graph, const rotor_link_t *link, int64_t budget,
                     const rotor_planner_options_t *options, const rotor_callback_t *callback,
                     rotor_program_t *program, rotor_cost_t *price, int64_t *minimum);

/*
 * As rotor_planner_curve(), with a link: its programs, and joint ones for `points` budgets in equal steps
 * from *least, the least budget that is accepted with the tier. `programs` and `costs` have 2 * points elements. Some
 * may beat others in both peak and time.
 */
int rotor_joint_curve(const rotor_dataflow_t *graph, const rotor_link_t *link, int64_t points,
                      const rotor_planner_options_t *options, const rotor_callback_t *callback,
                      rotor_program_t *programs, rotor_cost_t *costs, int64_t *count,
                      int64_t *least);

#endif
