--[[
  Gives back what one request was charged, never more than is still counted.
  Version  2

  KEYS   one per policy that was charged
  ARGV   now, unique and cost of the charge, then for each policy: algorithm, limit, window in ms, capacity, charged_at
         unique '': no charge in particular, the newest units go
  reply  {units given back, ...}
]]
local unique, cost = ARGV[2], tonumber(ARGV[3])
local given = {}

for i, key in ipairs(KEYS) do
  local at = 5 * i - 1
  local p = {
    algorithm = algorithms[ARGV[at]],
    key = key,
    limit = tonumber(ARGV[at + 1]),
    window = tonumber(ARGV[at + 2]),
    capacity = tonumber(ARGV[at + 3]),
  }
  local charged_at = unique == "" and now or tonumber(ARGV[at + 4])
  given[i] = p.algorithm("refund", p, now, cost, true, unique, charged_at)
end
return given
