#pragma once
#include <os/log.h>
#include <stdint.h>
typedef uint64_t os_signpost_id_t;
