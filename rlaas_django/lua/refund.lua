--[[
  Gives back what one request was charged, never more than is still counted.
  Version  3

  KEYS   one per policy that was charged
  ARGV   now, unique and cost of the charge, then for each policy: algorithm, limit, window in ms, capacity, charged_at
         unique '': no charge in particular, the newest units go
  reply  {units given back, ...}

  Where `-->` names a section, scripts.py puts in that section of the algorithm's file; it returns the units.
]]
local unique, cost = ARGV[2], tonumber(ARGV[3])

local function refund(algorithm, key, limit, window, charged_at)
  --> refund
end

local given = {}
for i, key in ipairs(KEYS) do
  local word = 5 * i - 1
  local charged_at = unique == "" and now or tonumber(ARGV[word + 4])
  given[i] = refund(ARGV[word], key, tonumber(ARGV[word + 1]), tonumber(ARGV[word + 2]), charged_at)
end
return given
