// See host_defines.h.
#pragma once
